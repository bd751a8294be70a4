"""How devices are split between inference and training. Pure.

A device is a GPU, or a CPU process where there are none. Replicas = floor(fraction * devices / replica size), at least
one, and so few that at least one training unit is left; training takes whole units of what is left; the remainder is shown.
A supervised run generates nothing: all devices train. An evaluation trains nothing: all devices generate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.config import AllocationConfig, ConfigError, ParallelConfig


@dataclass(frozen=True)
class Plan:
    """The split: inference has `num_replicas` of `replica_size` devices, training `num_train_devices`, `train_unit` for each copy of the model."""

    num_devices: int
    replica_size: int
    num_replicas: int
    num_train_devices: int
    train_unit: int = 1

    @property
    def num_inference_devices(self) -> int:
        """Devices that generate."""
        return self.num_replicas * self.replica_size

    @property
    def num_unused(self) -> int:
        """Devices that fit into neither part."""
        return self.num_devices - self.num_inference_devices - self.num_train_devices

    def describe(self) -> str:
        """One line for people."""
        share = self.num_inference_devices / self.num_devices
        unused = f", {self.num_unused} unused" if self.num_unused else ""
        if not self.num_replicas:
            return f"{self.num_devices} devices: {self.num_train_devices} for training{self._copies()}, none for inference{unused}"
        training = f"{self.num_train_devices} for training{self._copies()}" if self.num_train_devices else "none for training"
        return (f"{self.num_devices} devices: {self.num_inference_devices} for inference ({self.num_replicas} x {self.replica_size}, "
                f"{share:.0%}), {training}{unused}")

    def _copies(self) -> str:
        copies = self.num_train_devices // self.train_unit
        return f" ({copies} cop{'y' if copies == 1 else 'ies'} x {self.train_unit})" if self.train_unit > 1 else ""


def split(allocation: AllocationConfig, train_unit: int = 1, inference: bool = True, training: bool = True) -> Plan:
    """Split the devices; `train_unit` is the number of devices of one model copy in training (tp * pp * cp). `inference`: some generate;
    `training`: some train.

    Raises `ConfigError` where no split exists, naming the nearest that does.
    """
    devices, size = allocation.num_devices, allocation.replica_size
    if not inference:
        if devices < train_unit:
            raise ConfigError(f"allocation.num_devices={devices}: must be at least one training unit of {train_unit}. "
                              f"Use allocation.num_devices={train_unit}")
        return Plan(devices, size, 0, devices // train_unit * train_unit, train_unit)
    per_node = allocation.devices_per_node
    if size < 1:
        raise ConfigError(f"allocation.replica_size={size}: must be at least 1. It is the number of devices of a rollout worker")
    if per_node and per_node % size and size % per_node:
        raise ConfigError(f"allocation.replica_size={size}: must divide the {per_node} devices of a node, or be a multiple of them. "
                          f"Use one of {[number for number in range(1, per_node + 1) if per_node % number == 0]}")
    if not training:
        if devices < size:
            raise ConfigError(f"allocation.num_devices={devices}: must be at least one replica of {size}. Use allocation.num_devices={size}")
        return Plan(devices, size, devices // size, 0)
    if devices < size + train_unit:
        raise ConfigError(f"allocation.num_devices={devices}: must be at least {size + train_unit}, one replica of {size} and one "
                          f"training unit of {train_unit}. Use allocation.num_devices={size + train_unit}")
    # The fraction is a decimal number that binary floats miss by a hair: 0.7 * 10 is 7, not 6.999.
    wanted = math.floor(allocation.inference_fraction * devices / size + 1e-9)
    replicas = max(1, min(wanted, (devices - train_unit) // size))
    if allocation.min_replicas > replicas:
        raise ConfigError(f"allocation.min_replicas={allocation.min_replicas}: the split gives {replicas} replicas. "
                          f"Use allocation.min_replicas={replicas} or fewer")
    left = devices - replicas * size
    return Plan(devices, size, replicas, left // train_unit * train_unit, train_unit)


def plan(allocation: AllocationConfig, parallel: ParallelConfig, inference: bool = True, training: bool = True) -> Plan:
    """The split for copies of the model that are spread as `parallel` says. Raises `ConfigError` where that does not come out even."""
    unit = parallel.unit
    found = split(allocation, unit, inference, training)
    if not training:
        return found
    copies = found.num_train_devices // unit
    if parallel.dp not in (0, copies):
        shape = f"tp={parallel.tp}, pp={parallel.pp}, cp={parallel.cp}"
        raise ConfigError(f"trainer.parallel.dp={parallel.dp}: the split leaves training {found.num_train_devices} devices, which hold {copies} "
                          f"cop{'y' if copies == 1 else 'ies'} of {shape}. Use trainer.parallel.dp={copies} (or 0), or another "
                          "allocation.inference_fraction")
    same_layers = parallel.tp * parallel.cp * copies
    if same_layers % parallel.ep:
        raise ConfigError(f"trainer.parallel.ep={parallel.ep}: must divide the {same_layers} devices that hold the same layers (tp * cp * dp). "
                          f"Use a divisor of {same_layers}")
    return found

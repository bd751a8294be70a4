"""Which GPUs a server of a replica sees. Pure.

On SLURM a job sees its own GPUs, and its replica's servers share them in order. On one machine all jobs see all GPUs: training takes
the first ones, and the replicas the last ones, from the end.
"""

from __future__ import annotations

from workers.config import AllocationConfig, ConfigError

ALL = "all"


def of_job(visible: str | None, num_devices: int) -> list[str]:
    """The devices of a job on SLURM; `visible`: its CUDA_VISIBLE_DEVICES, None where the cluster only hides other jobs' devices.

    Raises `ConfigError` where it has fewer than `num_devices`.
    """
    devices = [str(number) for number in range(num_devices)] if visible is None else _listed(visible)
    if len(devices) < num_devices:
        raise ConfigError(f"allocation.replica_size={num_devices}: this job has {len(devices)} GPUs (CUDA_VISIBLE_DEVICES={visible!r}). "
                          "Let cluster.inference.gpus ask for them, or set engine.device=cpu")
    return devices[:num_devices]


def of_replica(visible: str, replica: int, allocation: AllocationConfig) -> list[str]:
    """The devices of a replica on one machine, counted from 0; `visible`: the launcher's CUDA_VISIBLE_DEVICES, or 'all'.

    Raises `ConfigError` where the launcher sees fewer than the run takes.
    """
    number, size = allocation.num_devices, allocation.replica_size
    devices = [str(index) for index in range(number)] if visible == ALL else _listed(visible)
    if len(devices) < number:
        raise ConfigError(f"allocation.num_devices={number}: the launcher sees {len(devices)} GPUs (CUDA_VISIBLE_DEVICES={visible!r}). "
                          "Use fewer devices, or set engine.device=cpu")
    end = number - replica * size
    return devices[end - size:end]


def of_server(devices: list[str], server: int, unit: int) -> str:
    """CUDA_VISIBLE_DEVICES of one server of `unit` devices."""
    return ",".join(devices[server * unit:(server + 1) * unit])


def _listed(visible: str) -> list[str]:
    return [device for device in visible.split(",") if device.strip()]

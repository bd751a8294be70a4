"""Config of the run itself: its name and length, its devices, its sockets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from workers.config.rules import require


@dataclass
class RunConfig:
    """What to run and where."""

    name: str = "headway"
    dir: str = ""
    seed: int = 1
    num_steps: int = 100
    target_accuracy: float | None = None
    stall_timeout_s: float = 600.0

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(re.fullmatch(r"[A-Za-z0-9._-]{1,80}", self.name) is not None, "run.name", self.name,
                "must be 1 to 80 letters, digits, '.', '_' or '-'", "It becomes a job name and part of paths")
        require(self.num_steps >= 1, "run.num_steps", self.num_steps, "must be at least 1", "Give the number of training steps")
        require(self.seed >= 0, "run.seed", self.seed, "must not be negative", "Give 0 or more")
        require(self.stall_timeout_s > 0, "run.stall_timeout_s", self.stall_timeout_s, "must be positive",
                "It is the time without any progress after which the run ends with an error")
        if self.target_accuracy is not None:
            require(0 < self.target_accuracy <= 1, "run.target_accuracy", self.target_accuracy, "must be in (0, 1]",
                    "Leave it null to always run run.num_steps steps")


@dataclass
class AllocationConfig:
    """How devices are split between inference and training (rule: docs/design.md, 'SLURM shape')."""

    num_devices: int = 2
    inference_fraction: float = 0.75
    replica_size: int = 1
    devices_per_node: int = 0
    min_replicas: int = 1

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work; the split itself is checked by launcher/partition.py."""
        require(0 < self.inference_fraction < 1, "allocation.inference_fraction", self.inference_fraction,
                "must be greater than 0 and less than 1", "The paper's choice is 0.75")
        require(self.min_replicas >= 1, "allocation.min_replicas", self.min_replicas, "must be at least 1",
                "Training needs one rollout worker to start")


@dataclass
class TransportConfig:
    """Sockets and their deadlines."""

    interface: str = "127.0.0.1"
    port_range: str = ""
    heartbeat_s: float = 1.0
    heartbeat_timeout_s: float = 60.0
    reconnect_grace_s: float = 5.0
    max_message_mb: int = 256

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.heartbeat_s > 0, "transport.heartbeat_s", self.heartbeat_s, "must be positive", "Give seconds")
        require(self.heartbeat_timeout_s > 2 * self.heartbeat_s, "transport.heartbeat_timeout_s", self.heartbeat_timeout_s,
                f"must be more than twice transport.heartbeat_s={self.heartbeat_s}", "Give seconds")
        require(self.reconnect_grace_s > 0, "transport.reconnect_grace_s", self.reconnect_grace_s, "must be positive", "Give seconds")
        require(self.max_message_mb >= 1, "transport.max_message_mb", self.max_message_mb, "must be at least 1", "Give MiB")
        self.ports()

    def ports(self) -> range | None:
        """The ports to bind, or None for any free one. `port_range` is 'FIRST-LAST', both included."""
        if not self.port_range:
            return None
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", self.port_range)
        first, last = (int(match[1]), int(match[2])) if match else (0, 0)
        require(1024 <= first <= last <= 65535, "transport.port_range", self.port_range,
                "must be FIRST-LAST with 1024 <= FIRST <= LAST <= 65535", "Leave it empty to take any free port")
        return range(first, last + 1)

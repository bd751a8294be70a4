"""Config of the run itself: its name and length, its devices, its sockets."""

from __future__ import annotations

import re
from dataclasses import dataclass

from workers.config.choices import ClusterKind, RunKind
from workers.config.rules import require


@dataclass
class RunConfig:
    """What to run and where. `kind`: `supervised` trains on answers that the data set knows; nothing is generated (docs/trainer.md).
    `evaluation` trains nothing (docs/evaluation.md)."""

    kind: RunKind = RunKind.rl  # reinforcement learning, supervised fine-tuning, or an evaluation alone
    name: str = "headway"  # becomes a job name and part of the run folder's
    dir: str = ""  # the run folder; empty: a new one in runs/
    seed: int = 1  # of prompts, samples and starting weights
    num_steps: int = 100  # [training steps] after which it ends
    target_accuracy: float | None = None  # [score] of the held-out prompts that ends the run; null: none does
    max_hours: float = 24.0  # that training may take, in all its incarnations together: then the run is drained
    stall_minutes: float = 20.0  # without any progress, after which the run ends
    journal_mb: int = 256  # of what the coordinator is told, for headway replay; the oldest goes first; 0: none
    outage_minutes: float = 15.0  # that the run folder may be full or away, after which the run ends

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(re.fullmatch(r"[A-Za-z0-9._-]{1,80}", self.name) is not None, "run.name", self.name,
                "must be 1 to 80 letters, digits, '.', '_' or '-'", "It becomes a job name and part of paths")
        require(1 <= self.num_steps < 2**31, "run.num_steps", self.num_steps, "must be at least 1 and below 2^31",
                "Give the number of training steps")
        require(self.seed >= 0, "run.seed", self.seed, "must not be negative", "Give 0 or more")
        require(0.05 <= self.max_hours <= 10_000, "run.max_hours", self.max_hours, "must be from 0.05 to 10000",
                "It is the time that training may take: a local job ends after it, on SLURM it sets the number of chunks of wall time")
        require(self.stall_minutes > 0, "run.stall_minutes", self.stall_minutes, "must be positive",
                "It is the time without any progress after which the run ends with an error")
        require(0 <= self.outage_minutes < 10_000, "run.outage_minutes", self.outage_minutes, "must be from 0 to less than 10000",
                "It is the time that the run folder may be full or away before the run ends; 0 waits for nothing")
        require(0 <= self.journal_mb <= 1 << 20, "run.journal_mb", self.journal_mb, "must be from 0 to 1048576",
                "256 hold many hours; 0 records nothing, and headway replay has nothing to show then")
        if self.target_accuracy is not None:
            require(0 < self.target_accuracy <= 1, "run.target_accuracy", self.target_accuracy, "must be in (0, 1]",
                    "Leave it null to always run run.num_steps steps")


@dataclass
class AllocationConfig:
    """How devices are split between inference and training (rule: launcher/config/device_split.py)."""

    num_devices: int = 2  # GPUs, or CPU processes where there are none
    inference_fraction: float = 0.75  # the share of devices that generates; the rest trains
    replica_size: int = 1  # [devices] of one rollout worker; 0: a node's GPUs where that comes out even, else those of one server
    devices_per_node: int = 0  # GPUs of a node; 0: as SLURM says
    min_replicas: int = 1  # [rollout workers] that training needs to start

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work; the split itself is checked by launcher/config/device_split.py."""
        require(0 < self.inference_fraction < 1, "allocation.inference_fraction", self.inference_fraction,
                "must be greater than 0 and less than 1", "The paper's choice is 0.75")
        require(self.min_replicas >= 1, "allocation.min_replicas", self.min_replicas, "must be at least 1",
                "Training needs one rollout worker to start")


@dataclass
class ClusterConfig:
    """What the jobs need to know of the cluster; how they are submitted is added by launcher/config/schema.py.

    `signal_delay_s`: how long before its time limit a job is told (USR2). A crashed training job is followed by the next one after
    `crash_backoff_s` (doubled each time), until `max_consecutive_crashes` in a row have brought no new checkpoint.
    """

    kind: ClusterKind = ClusterKind.local  # this machine, or SLURM
    signal_delay_s: int = 120  # before its time limit at which a job is told to save
    max_consecutive_crashes: int = 3  # without a new checkpoint, after which the run ends
    crash_backoff_s: float = 10.0  # before the next job after a crash; doubled each time

    @property
    def stay_s(self) -> float:
        """How long an element that failed at its start stays where it is: the next one would most likely fail there alike."""
        return min(300.0, 6 * self.crash_backoff_s)

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(10 <= self.signal_delay_s <= 3600, "cluster.signal_delay_s", self.signal_delay_s, "must be from 10 to 3600",
                "Give about twice the time of a training step and a checkpoint, in seconds")
        require(self.max_consecutive_crashes >= 1, "cluster.max_consecutive_crashes", self.max_consecutive_crashes, "must be at least 1",
                "1 ends the run at the first crash")
        require(self.crash_backoff_s >= 0, "cluster.crash_backoff_s", self.crash_backoff_s, "must not be negative", "Give seconds")


@dataclass
class CheckpointConfig:
    """When the state of a run is saved, besides at every drain: after so many steps or minutes (0: not), whichever comes first.

    `background`: training goes on while a copy of the state, in the host's memory, is written. `keep_best`: it is saved at every evaluated
    step too, and the checkpoint with the best held-out accuracy stays besides the newest `keep`.
    """

    every_steps: int = 0  # [training steps] between checkpoints; 0: by time only
    every_minutes: float = 15.0  # between checkpoints; 0: by steps only
    keep: int = 2  # newest checkpoints that stay
    keep_best: bool = True  # the best held-out one stays too
    background: bool = True  # training goes on while a checkpoint is written

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        require(self.every_steps >= 0, "checkpoint.every_steps", self.every_steps, "must not be negative", "0 saves by time only")
        require(self.every_minutes >= 0, "checkpoint.every_minutes", self.every_minutes, "must not be negative", "0 saves by steps only")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "must be at least 1", "2 leave one to fall back to")


@dataclass
class TransportConfig:
    """Sockets and their deadlines."""

    interface: str = "127.0.0.1"  # address or network interface on which parts of a run meet; auto: the node's own
    port_range: str = ""  # FIRST-LAST of the ports that may be used; empty: any
    heartbeat_s: float = 1.0  # between signs of life
    heartbeat_timeout_s: float = 60.0  # without one, after which a worker counts as lost
    reconnect_grace_s: float = 5.0  # for a lost connection to come back
    max_message_mb: int = 256  # of one message

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

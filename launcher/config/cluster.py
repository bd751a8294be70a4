"""The config of how jobs are submitted: `cluster.*`, in the units of sbatch.

`cluster.inference`, `cluster.train` and, with reward.placement=array, `cluster.reward` say what one job of each role asks for;
conf/cluster/slurm.yaml lets all take what they share (account, qos, time, setup, python, container) from `cluster` itself.
A value that is empty is not passed to sbatch.
sbatch_options.py translates all this into sbatch's options.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field

from workers.config import ClusterConfig as WorkersClusterConfig
from workers.config import ClusterKind, ConfigError, require

ROLES = ("inference", "reward", "train")
GPU_OPTIONS = ("gres", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "tres-per-task")
"""Of sbatch, with which GPUs are asked for."""
_TIME = re.compile(r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
                   r"|(?P<hours>\d+):(?P<hour_minutes>\d+):(?P<hour_seconds>\d+)|(?P<minutes>\d+)(?::(?P<seconds>\d+))?)")
_MEMORY = re.compile(r"\d+[KMGT]?B?", re.IGNORECASE)


class GpuRequest(str, enum.Enum):
    """With which of sbatch's options GPUs are asked for; `none` where a device is a CPU process."""

    gres = "gres"
    gpus_per_node = "gpus_per_node"
    gpus_per_task = "gpus_per_task"
    none = "none"


class ContainerKind(str, enum.Enum):
    """In what the job's processes run."""

    none = "none"
    apptainer = "apptainer"
    pyxis = "pyxis"


def seconds(text: str) -> int:
    """A time limit as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].

    SLURM counts in minutes and rounds up. Raises `ValueError`.
    """
    match = _TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    total = (part["days"] * 86400 + (part["day_hours"] + part["hours"]) * 3600 + part["day_seconds"] + part["hour_seconds"] + part["seconds"]
             + (part["day_minutes"] + part["hour_minutes"] + part["minutes"]) * 60)
    return math.ceil(total / 60) * 60


def as_sbatch(given: str) -> str:
    """The name of an option as sbatch has it: users write it with or without dashes, or with underscores."""
    return given.replace("_", "-").lstrip("-")


def asks_for_gpus(sbatch: dict[str, str]) -> bool:
    """Whether options that users give themselves ask for GPUs (gres may be for other things)."""
    return any(as_sbatch(name) in GPU_OPTIONS and "gpu" in f"{name}{value}" for name, value in sbatch.items())


def check_environment(key: str, variables: dict[str, str]) -> None:
    """Raise `ConfigError` on a name that a shell does not take."""
    for name in variables:
        require(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is not None, key, name, "must be the name of an environment variable",
                "For example NCCL_IB_HCA: mlx5")


@dataclass
class ContainerConfig:
    """The container of a job: `mounts` are 'HOST[:INSIDE[:FLAGS]]', `args` further arguments of the container's command."""

    kind: ContainerKind = ContainerKind.none  # in what a job's processes run
    image: str = ""  # file or address of the image
    mounts: list[str] = field(default_factory=list)  # besides this code and the run folder, as HOST[:INSIDE[:FLAGS]]
    args: list[str] = field(default_factory=list)  # further arguments of the container's command

    def check(self, key: str) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        wanted = self.kind is not ContainerKind.none
        require(bool(self.image) == wanted, f"{key}.image", self.image, f"must {'' if wanted else 'not '}be given with {key}.kind={self.kind.value}",
                "Name an image file or address" if wanted else f"Set {key}.kind=apptainer or {key}.kind=pyxis")
        for argument in self.args:
            require(argument not in ("-e", "--cleanenv", "-C", "--containall"), f"{key}.args", argument,
                    "takes SLURM's variables away, by which a job knows its place", "Leave it out; unset single variables in setup")


@dataclass
class RoleConfig:
    """What one job of a role asks for. Any other option of sbatch stands in `sbatch` (an empty value: an option without one).

    `devices_per_node`: GPUs of this partition's nodes (0: `allocation.devices_per_node`; for training, where that is 0 too, SLURM is asked).
    `gpu_memory_gb`: GiB of each of its GPUs, by which a training layout that cannot fit is refused (0: what their type says, docs/trainer.md).
    `pythonpath`: where Python looks besides; the launcher fills it in from the shell that starts the run, and keeps it for later jobs.
    """

    partition: str = ""  # where this role's jobs run; empty: the cluster's default partition
    account: str = ""  # account that is charged
    qos: str = ""  # quality of service
    time: str = ""  # time limit of one job, as MINUTES, HH:MM:SS or D-HH:MM:SS; a run takes several jobs
    constraint: str = ""  # features that nodes must have
    nodelist: str = ""  # nodes that must be taken
    exclude: str = ""  # nodes that must not be taken
    reservation: str = ""  # of nodes
    mem: str = ""  # memory of a node, as 64G
    mem_per_gpu: str = ""  # memory for each GPU, as 64G
    cpus_per_gpu: int = 0  # CPUs for each GPU; 0: as SLURM says
    cpus_per_task: int = 0  # CPUs for each process; 0: as SLURM says
    gpus: GpuRequest = GpuRequest.gres  # with which of sbatch's options GPUs are asked for
    gpu_type: str = ""  # as the cluster names it
    gpu_memory_gb: float = 0.0  # of each GPU; 0: by its type
    devices_per_node: int = 0  # GPUs of this partition's nodes; 0: allocation.devices_per_node
    exclusive: bool = False  # whole nodes
    env: dict[str, str] = field(default_factory=dict)  # environment variables of the job, as NAME: VALUE
    setup: list[str] = field(default_factory=list)  # lines of shell before the job's processes start
    container: ContainerConfig = field(default_factory=ContainerConfig)
    python: str = ""  # interpreter on the nodes; empty: this one
    pythonpath: str = ""  # where Python looks besides; filled in from this shell
    srun_args: list[str] = field(default_factory=list)  # further arguments of srun
    sbatch: dict[str, str] = field(default_factory=dict)  # any other option of sbatch, as NAME: VALUE

    @property
    def time_limit_s(self) -> int:
        """The time limit of one job."""
        return seconds(self.time)

    def check(self, key: str) -> None:
        """Raise `ConfigError` on a value that cannot work with SLURM; `key`: where this stands in the config."""
        try:
            limit = self.time_limit_s
        except ValueError:
            limit = 0
        require(limit > 0, f"{key}.time", self.time, "must be a time limit as sbatch reads it, and not without limit",
                "Give minutes, HH:MM:SS, or D-HH:MM:SS: each job trains for this long, and the next one goes on from there")
        for name in ("mem", "mem_per_gpu"):
            value = getattr(self, name)
            require(not value or _MEMORY.fullmatch(value) is not None, f"{key}.{name}", value, "must be a number and K, M, G or T", "For example 64G")
        for name in ("cpus_per_gpu", "cpus_per_task", "devices_per_node", "gpu_memory_gb"):
            require(getattr(self, name) >= 0, f"{key}.{name}", getattr(self, name), "must not be negative", "0 leaves it to SLURM")
        for one, other in (("mem", "mem_per_gpu"), ("cpus_per_gpu", "cpus_per_task")):
            require(not (getattr(self, one) and getattr(self, other)), f"{key}.{one}", getattr(self, one),
                    f"cannot be given beside {key}.{other}={getattr(self, other)!r}", "SLURM takes one of the two")
        if self.gpus is GpuRequest.none and not asks_for_gpus(self.sbatch):
            for name in ("mem_per_gpu", "cpus_per_gpu", "gpu_type", "gpu_memory_gb"):
                require(not getattr(self, name), f"{key}.{name}", getattr(self, name), f"needs GPUs, and {key}.gpus=none asks for none",
                        f"Leave it out, or set {key}.gpus=gres")
        self.container.check(f"{key}.container")
        check_environment(f"{key}.env", self.env)
        self._check_text(key)

    def _check_text(self, key: str) -> None:
        single = {name: value for name, value in vars(self).items() if isinstance(value, str)}
        single |= {f"env.{name}": value for name, value in self.env.items()}
        single |= {f"sbatch.{name}": value for name, value in self.sbatch.items()} | {"container.image": self.container.image}
        for name, value in single.items():
            require("\n" not in value and "\0" not in value, f"{key}.{name}", value, "must be one line", "It becomes one option of sbatch")


@dataclass
class ClusterConfig(WorkersClusterConfig):
    """How jobs are submitted, around what the workers need to know.

    `spare_chunks`: jobs of wall time beyond those that `run.max_hours` needs, for crashes and for time lost. `probe_s`: how long the launcher
    waits for a node on which it tries, before anything is submitted, whether the run folder and this code are there (0: it does not).
    `max_submit`: how many jobs (array elements) you may have queued at once (0: as many as SLURM's own limits say).
    """

    spare_chunks: int = 3  # jobs beyond those that run.max_hours needs
    probe_s: float = 10.0  # to wait for a node on which the run folder is tried; 0: not tried
    max_submit: int = 0  # jobs that you may have queued at once; 0: as SLURM says
    account: str = ""  # account of all roles that name no other
    qos: str = ""  # quality of service of all roles
    time: str = ""  # time limit of one job, of all roles
    env: dict[str, str] = field(default_factory=dict)  # environment variables of all processes, as NAME: VALUE
    fake_gpus: bool = False  # GPUs are counted but not there, as on slurm/local: training runs on CPUs
    setup: list[str] = field(default_factory=list)  # lines of shell before the processes start, of all roles
    python: str = ""  # interpreter on the nodes, of all roles
    container: ContainerConfig = field(default_factory=ContainerConfig)
    inference: RoleConfig = field(default_factory=RoleConfig)
    train: RoleConfig = field(default_factory=RoleConfig)
    reward: RoleConfig = field(default_factory=lambda: RoleConfig(gpus=GpuRequest.none))

    def role(self, role: str) -> RoleConfig:
        """The part of one of `ROLES`."""
        return {"inference": self.inference, "train": self.train, "reward": self.reward}[role]

    def check(self) -> None:
        """Raise `ConfigError` on a value that cannot work."""
        super().check()
        require(self.spare_chunks >= 0, "cluster.spare_chunks", self.spare_chunks, "must not be negative", "3 make up for a few crashes")
        require(self.probe_s >= 0, "cluster.probe_s", self.probe_s, "must not be negative", "Give seconds; 0 leaves the probe out")
        check_environment("cluster.env", self.env)
        require(self.max_submit >= 0, "cluster.max_submit", self.max_submit, "must not be negative", "0 takes SLURM's own limits")
        if self.kind is ClusterKind.slurm:
            for role in ("inference", "train"):
                self.check_role(role)

    def check_role(self, role: str) -> None:
        """Check one role's part. Raises `ConfigError`."""
        part = self.role(role)
        part.check(f"cluster.{role}")
        if part.time_limit_s < 2 * self.signal_delay_s:
            raise ConfigError(f"cluster.{role}.time={part.time!r}: must be at least twice cluster.signal_delay_s={self.signal_delay_s}, the time "
                              "that a job has at its end for saving. Give a longer time limit, or a shorter cluster.signal_delay_s")

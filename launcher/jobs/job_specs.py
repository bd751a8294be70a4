"""From the plan to job specifications: what is submitted, in the terms of the project. Pure.

    train      K elements, one at a time: each is one chunk of wall time of the whole training gang
    inference  N*K elements, N at a time: each is one replica, of one node or of several, for one chunk of wall time; none in a supervised run
    reward     N*K elements, N = reward.num_elements: each judges on CPUs for one chunk of wall time; only with reward.placement=array

An evaluation alone has inference elements only; they judge what they generate.

Elements have no identity: whoever starts next goes on from the newest checkpoint, or registers with the newest coordinator.
K covers run.max_hours, plus spare chunks. What does not fit into one array goes out as several, one after the other (`waves`);
what is more than may be queued at once is left for later (`fit`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.config.cluster import ContainerKind
from launcher.config.device_split import Plan, split
from launcher.config.replica_nodes import replica_nodes
from launcher.config.schema import FullConfig
from launcher.slurm.submit_limits import Room
from workers.config import AllocationConfig, ClusterKind, ConfigError, require
from workers.entry import Element
from workers.run.folder import RunFolder

MIN_ELEMENTS = 2  # submitit makes no array of one


@dataclass(frozen=True)
class JobSpec:
    """All jobs of one role: `num_chunks` times `throttle` elements, `throttle` of them at a time. `devices_per_node`: 0 where devices are of
    no use; `num_threads` of its processes' libraries, or `num_processes` of its own, for people."""

    role: str
    name: str
    element: Element
    throttle: int
    num_chunks: int
    nodes_per_element: int
    tasks_per_node: int
    devices_per_node: int
    time_limit_s: int
    num_threads: int
    num_processes: int = 0

    @property
    def num_elements(self) -> int:
        """How many elements that is."""
        return self.throttle * self.num_chunks

    @property
    def devices_per_element(self) -> int:
        """Devices of one element on all its nodes."""
        return self.nodes_per_element * self.devices_per_node

    def describe(self) -> str:
        """One line for people."""
        shape = (f"{self.nodes_per_element} nodes x {self.devices_per_node}" if self.nodes_per_element > 1 else str(self.devices_per_node))
        what = f"{shape} device(s)" if self.devices_per_node else f"{self.num_processes} process(es)"
        chunks = f", {self.num_chunks} chunks of {self.time_limit_s / 3600:g} h" if self.num_chunks > 1 else ""
        return f"{self.name}: {self.num_elements} element(s) x {what}, {self.throttle} at a time{chunks}"


def job_specs(plan: Plan, config: FullConfig, run: RunFolder) -> tuple[JobSpec, ...]:
    """The jobs of inference, where there are replicas, of rewards, where they have their own, and of training, where there is any.

    Raises `ConfigError` where nodes are too small or do not come out even."""
    spread = replica_nodes(config) if plan.num_replicas else 1
    per_node = config.devices_per_node("train")
    nodes = num_train_nodes(plan, per_node)
    if plan.num_train_devices % nodes:
        near = " or ".join(map(str, even_sizes(config.allocation, per_node, config.trainer.parallel.unit, bool(plan.num_replicas))))
        raise ConfigError(f"allocation.num_devices={plan.num_devices}: leaves {plan.num_train_devices} devices to training, which do not spread "
                          f"evenly over {nodes} nodes of {per_node}. Use {f'allocation.num_devices={near}, or ' if near else ''}"
                          "another allocation.inference_fraction")
    on_slurm = config.cluster.kind is ClusterKind.slurm
    require(not on_slurm or not {"%", "\n", '"', "\\"} & set(str(run.path)), "run.dir", str(run.path), "must hold no '%', '\"', '\\' or line break",
            "SLURM replaces patterns such as %j in the paths of its logs, and others are quoted: choose another folder")
    contained = on_slurm and any(config.cluster.role(role).container.kind is not ContainerKind.none for role in config.roles)
    require(not contained or not {":", ","} & set(str(run.path)), "run.dir", str(run.path), "must hold no ':' or ',' with a container",
            "They part the folders that a container is shown: choose another folder")

    def spec(role: str, worker: str, throttle: int, num_nodes: int, devices: int, threads: int) -> JobSpec:
        ranks = devices if role == "train" and not on_slurm else 1
        return JobSpec(role, f"{config.run.name}-{role}", Element(worker, str(run.path), ranks), throttle,
                       num_chunks(config, role) if on_slurm else 1, num_nodes, devices if role == "train" and on_slurm else 1, devices,
                       config.cluster.role(role).time_limit_s if on_slurm else math.ceil(config.run.max_hours * 60) * 60, threads)

    if config.evaluates:
        return (spec("inference", "evaluation", plan.num_replicas, spread, plan.replica_size // spread, 1),)
    train = spec("train", "train", 1, nodes, plan.num_train_devices // nodes, config.trainer.num_threads)
    inference = (spec("inference", "rollout", plan.num_replicas, spread, plan.replica_size // spread, 1),) if plan.num_replicas else ()
    if not config.rewards_apart:
        return (*inference, train)
    reward = spec("reward", "reward", config.reward.num_elements, 1, 0, 1)
    return (*inference, dataclasses.replace(reward, num_processes=config.reward.num_processes), train)


def num_train_nodes(plan: Plan, per_node: int) -> int:
    """How many nodes of `per_node` devices training takes (0: all is on one node)."""
    return max(1, math.ceil(plan.num_train_devices / per_node)) if per_node else 1


def even_sizes(allocation: AllocationConfig, per_node: int, train_unit: int = 1, inference: bool = True) -> list[int]:
    """The nearest numbers of devices, below and above, of which training's part spreads evenly over nodes of `per_node`."""
    def is_even(number: int) -> bool:
        try:
            plan = split(dataclasses.replace(allocation, num_devices=number), train_unit, inference)
        except ConfigError:
            return False
        return plan.num_train_devices % num_train_nodes(plan, per_node) == 0

    devices = allocation.num_devices
    found = [next(filter(is_even, numbers), None) for numbers in (range(devices - 1, 0, -1), range(devices + 1, 2 * devices + 1))]
    return [number for number in found if number is not None]


def num_chunks(config: FullConfig, role: str) -> int:
    """How many jobs after one another cover run.max_hours; the end of each is spent on saving."""
    useful = config.cluster.role(role).time_limit_s - config.cluster.signal_delay_s
    return max(MIN_ELEMENTS, math.ceil(config.run.max_hours * 3600 / useful) + config.cluster.spare_chunks)


def waves(spec: JobSpec, max_array_size: int) -> list[int]:
    """The sizes of the arrays that hold all elements of `spec`, one array after the other; whole chunks each. Raises `ConfigError`."""
    chunks = max_array_size // spec.throttle
    if max_array_size < MIN_ELEMENTS or chunks < 1:
        raise ConfigError(f"allocation.num_devices: {spec.name} needs an array of {max(spec.throttle, MIN_ELEMENTS)} jobs side by side, and the "
                          f"cluster's MaxArraySize={max_array_size}. Use a larger allocation.replica_size, or fewer devices")
    full, rest = divmod(spec.num_chunks, chunks)
    sizes = [chunks * spec.throttle] * full + ([rest * spec.throttle] if rest else [])
    return [max(MIN_ELEMENTS, size) for size in sizes]


def fit(specs: tuple[JobSpec, ...], rooms: Sequence[Room]) -> tuple[JobSpec, ...]:
    """The same jobs with so few chunks that every one of `rooms` has place for those of its roles. Raises `ConfigError` where none are left."""
    for room in rooms:
        specs = _fit_into(specs, room)
    return specs


def _fit_into(specs: tuple[JobSpec, ...], room: Room) -> tuple[JobSpec, ...]:
    def cut(num: int) -> tuple[JobSpec, ...]:
        return tuple(dataclasses.replace(spec, num_chunks=min(spec.num_chunks, max(num, math.ceil(MIN_ELEMENTS / spec.throttle))))
                     if spec.role in room.roles else spec for spec in specs)

    def size(num: int) -> int:
        return sum(spec.num_elements for spec in cut(num) if spec.role in room.roles)

    if not size(1):
        return specs  # a limit of other roles
    if size(1) > room.left:
        raise ConfigError(f"{room.limit}: you may have {max(0, room.left)} more jobs in the queue, and this run needs at least {size(1)}. Wait for "
                          f"others of your jobs, use fewer replicas, or {room.remedy}")
    chunks = max(spec.num_chunks for spec in specs if spec.role in room.roles)
    while size(chunks) > room.left:
        chunks -= 1
    return cut(chunks)

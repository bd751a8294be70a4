"""Whether a run's parts fit into the memory they get. What cannot fit is refused with the nearest that does. Pure.

    config, model's shapes --estimate.py--> bytes of a training rank and of a replica --> told with the plan
    capacity.py --> the memory there is, as far as it is known
    more than that --> the cheapest change of the trainer, its layout and its devices with which all fits (`nearest`)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.config.replica_nodes import replica_nodes
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import num_train_nodes
from launcher.memory.activations import MIB, layout
from launcher.memory.capacity import Capacities, Capacity, bytes_of
from launcher.memory.estimate import (
    SGLANG_SHARE,
    StoredWeights,
    bytes_in_words,
    node_share,
    parts_in_words,
    rank_memory,
    replica_memory,
    server_memory,
    stored_weights,
)
from launcher.memory.parameters import Weights, count_weights
from workers.config import ClusterKind, ConfigError, Recompute, require
from workers.model.architecture import Architecture
from workers.model.parallel_limits import check_engine, check_training

COORDINATOR, JUDGE_SERVER_MB = 300 * MIB, 128
"""The coordinator's and the launcher's processes; the server that a reward process has for algebra (workers/reward/verifiers/bounded_server.py)."""
TRAINING = ("trainer.microbatch_tokens", "trainer.recompute", "trainer.optimizer_offload", "trainer.parallel.tp", "trainer.parallel.pp",
            "trainer.parallel.cp")
INFERENCE = ("engine.num_slots", "engine.context_length")
SERVER = ("engine.context_length", "engine.parallel.tp")


@dataclass(frozen=True)
class Need:
    """What a part of the run takes: `parts` add up to `size` bytes. `keys` of the config decide it."""

    what: str
    parts: dict[str, float]
    room: Capacity | None
    keys: tuple[str, ...]

    @property
    def size(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether there is room for it, as far as anybody knows."""
        return self.room is None or self.size <= self.room.size

    def describe(self) -> str:
        """One line for people."""
        room = f" of {bytes_in_words(self.room.size)}" if self.room else ""
        return f"{self.what} about {bytes_in_words(self.size)}{room} ({parts_in_words(self.parts.items())})"


def needs(config: FullConfig, architecture: Architecture, weights: Weights, capacities: Capacities) -> list[Need]:
    """What each part of the run takes, with the room for it. Raises `ConfigError` where there is no plan."""
    plan = config.plan()
    if config.evaluates:
        return _needs_of_evaluation(config, architecture, weights, capacities)
    rank = rank_memory(config, architecture, weights, layout(config, plan.num_train_devices, capacities.on_gpus))
    replica = replica_memory(config, architecture, weights, config.replica_nodes)
    stored = stored_weights(config, architecture, weights, config.cluster.kind is ClusterKind.local) if plan.num_replicas else StoredWeights(0.0, 0.0)
    found = [Need("a training rank takes", rank.parts(), capacities.gpu, TRAINING)]
    if capacities.machine is None and plan.num_replicas:
        found.append(Need("an inference replica takes", replica | {"held weights": stored.held}, capacities.replica, INFERENCE))
    if plan.num_replicas:
        found += _of_servers(config, architecture, weights, capacities)
    if capacities.node is not None:
        ranks = math.ceil(plan.num_train_devices / num_train_nodes(plan, config.devices_per_node("train")))
        found.append(Need("the ranks of a training node take", {
            "host memory": ranks * (rank.host if capacities.on_gpus else rank.total),
            "published weights": stored.published * node_share(plan.num_train_devices, ranks, config.trainer.parallel.pp)},
            capacities.node, TRAINING))
    if capacities.machine is not None:
        found.append(Need("all processes on this machine take", {
            "training": plan.num_train_devices * (rank.host if capacities.on_gpus else rank.total),
            "inference": plan.num_replicas * sum(replica.values()),
            "published and held weights": stored.published + stored.held,
            "coordinator": COORDINATOR}, capacities.machine, TRAINING + INFERENCE))
    return found


def in_shared_memory(config: FullConfig, architecture: Architecture) -> dict[str, float]:
    """Bytes of weights that lie in the memory of a node of each role (on SLURM)."""
    plan = config.plan()
    if not plan.num_replicas or not plan.num_train_devices:
        return {}
    stored = stored_weights(config, architecture, count_weights(architecture), local=False)
    ranks = math.ceil(plan.num_train_devices / num_train_nodes(plan, config.devices_per_node("train")))
    return {"train": stored.published * node_share(plan.num_train_devices, ranks, config.trainer.parallel.pp), "inference": stored.held}


def _of_servers(config: FullConfig, architecture: Architecture, weights: Weights, capacities: Capacities) -> list[Need]:
    if (gpu := capacities.inference_gpu) is None:
        return []
    share = config.engine.mem_fraction or SGLANG_SHARE
    part = Capacity(share * gpu.size, f"{share:.0%} of {gpu.what} (engine.mem_fraction)", gpu.key)
    return [Need("an inference GPU takes at least", server_memory(config, architecture, weights), part, SERVER)]


def _needs_of_evaluation(config: FullConfig, architecture: Architecture, weights: Weights, capacities: Capacities) -> list[Need]:
    replica, replicas = replica_memory(config, architecture, weights, config.replica_nodes), config.plan().num_replicas
    whole = {name: replicas * size for name, size in replica.items()}
    of_all = Need("all replicas on this machine take", whole, capacities.machine, INFERENCE)
    return [of_all if capacities.machine is not None else Need("an inference replica takes", replica, capacities.replica, INFERENCE),
            *_of_servers(config, architecture, weights, capacities)]


def check(config: FullConfig, architecture: Architecture, capacities: Capacities, changeable: Collection[str] | None = None) -> list[str]:
    """Lines to tell of what each part takes. Raises `ConfigError` where the model cannot be split so, or with the `nearest` that fits."""
    check_training(architecture, config.trainer)
    check_engine(architecture, config.engine.parallel)
    weights = count_weights(architecture)
    found = needs(config, architecture, weights, capacities)
    for need in found:
        if not need.fits:
            raise ConfigError(_refusal(config, need, nearest(config, architecture, weights, capacities, changeable)))
    return [need.describe() for need in found] + _rewards(config)


def _rewards(config: FullConfig) -> list[str]:
    """What a reward element takes, in words. Raises `ConfigError` where its processes may take more than its job has: SLURM would then kill
    them all, and not the one at fault."""
    if not config.rewards_apart:
        return []
    number, each = config.reward.num_processes, config.reward.memory_mb + JUDGE_SERVER_MB
    size, room = number * each * MIB + COORDINATOR, bytes_of(config.cluster.reward.mem)
    on_slurm = config.cluster.kind is ClusterKind.slurm
    require(not (on_slurm and 0 < room < size), "cluster.reward.mem", config.cluster.reward.mem,
            f"must be at least {bytes_in_words(size)}, for reward.num_processes={number} of up to reward.memory_mb={config.reward.memory_mb}, each "
            f"with a server of {JUDGE_SERVER_MB} MiB for algebra",
            "Give more, or use fewer processes or less for each")
    return [f"a reward element takes at most about {bytes_in_words(size)} ({number} processes of up to {each} MiB)"]


def _refusal(config: FullConfig, need: Need, changes: dict[str, Any] | None) -> str:
    assert need.room is not None
    asked = ", ".join(f"{key}={_text(_value(config, key))}" for key in need.keys)
    told = (f"{asked}: {need.what} about {bytes_in_words(need.size)} ({parts_in_words(need.parts.items())}), and {need.room.what} has "
            f"{bytes_in_words(need.room.size)} ({need.room.key})")
    if changes is None:
        return f"{told}. No layout that could be found fits: use devices with more memory, more of them, or a smaller model"
    return f"{told}. The nearest that fits: {' '.join(f'{key}={_text(value)}' for key, value in changes.items())}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


Choice = tuple[float, dict[str, Any]]
"""A change of config keys, and how far it is from what was asked for."""


def nearest(config: FullConfig, architecture: Architecture, weights: Weights, capacities: Capacities,
            changeable: Collection[str] | None = None) -> dict[str, Any] | None:
    """The cheapest change with which everything fits, as values by key, of the keys `changeable` alone if they are given; None if there is none."""
    concerned = {key for need in needs(config, architecture, weights, capacities) if not need.fits for key in need.keys}
    axes = _axes(config, capacities, concerned)
    for changes in _combinations([[one for one in axis if changeable is None or one[1].keys() <= set(changeable)] for axis in axes]):
        candidate = changed(config, changes)
        try:
            check_training(architecture, candidate.trainer)
            check_engine(architecture, candidate.engine.parallel)
            replica_nodes(candidate)
            if all(need.fits for need in needs(candidate, architecture, weights, capacities)):
                return changes
        except ConfigError:  # no split of the model, or of the devices
            continue
    return None


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """The config, or a part of it, with values by key ('trainer.parallel.tp')."""
    below: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        below.setdefault(name, {})[rest] = value
    return dataclasses.replace(config, **{
        name: some[""] if "" in some else changed(getattr(config, name), some) for name, some in below.items()})


def _value(config: Any, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _combinations(axes: Sequence[Sequence[Choice]]) -> Iterator[dict[str, Any]]:
    """One choice of each axis, cheapest together first; the one without any change is left out."""
    found = [(sum(cost for cost, _ in combination), combination) for combination in itertools.product(*axes)]
    for _, combination in sorted(found[1:], key=lambda entry: entry[0]):
        yield {key: value for _, changes in combination for key, value in changes.items()}


def _axes(config: FullConfig, capacities: Capacities, concerned: set[str]) -> list[list[Choice]]:
    """What may be changed of the keys that are concerned, each from what it is now on. Costs: what takes time in a step is little, other
    devices are much."""
    trainer, parallel, engine, modes = config.trainer, config.trainer.parallel, config.engine, list(Recompute)
    per_node, on_slurm = config.devices_per_node("train") or 8, config.cluster.kind is ClusterKind.slurm
    training = [
        _axis("trainer.recompute", 1.0, modes[modes.index(trainer.recompute) + 1:]),
        _axis("trainer.microbatch_tokens", 1.0, [max(engine.context_length, trainer.microbatch_tokens >> times) for times in range(1, 8)
                                                 if trainer.microbatch_tokens >> (times - 1) > engine.context_length]),
        _axis("trainer.optimizer_offload", 5.0, [share for share in (0.5, 1.0) if capacities.on_gpus and share > trainer.optimizer_offload]),
        _axis("trainer.parallel.tp", 3.0, [tp for tp in _doubled(parallel.tp, 3) if tp <= per_node]),
        _axis("trainer.parallel.pp", 4.0, _doubled(parallel.pp, 5)),
        _axis("trainer.parallel.cp", 3.5, _doubled(parallel.cp, 3)),
        _axis("allocation.num_devices", 10.0, _doubled(config.allocation.num_devices, 4) if on_slurm else []),
    ]
    inference = [_axis("engine.num_slots", 2.0, [engine.num_slots >> times for times in range(1, 8) if engine.num_slots >> times])]
    server = [_wider_servers(config, per_node)]
    if parallel.dp:  # as many copies as there are devices for
        training[3:] = [[(cost, changes and {**changes, "trainer.parallel.dp": 0}) for cost, changes in axis] for axis in training[3:]]
    return ((training if concerned & set(TRAINING) else []) + (inference if concerned & set(INFERENCE) else [])
            + (server if concerned & set(SERVER) else []))


def _wider_servers(config: FullConfig, per_node: int) -> list[Choice]:
    """More GPUs for each server, and replicas that hold whole ones; beyond a node whole nodes."""
    engine, size, fits = config.engine.parallel, config.allocation.replica_size, config.devices_per_node("inference")
    found: list[Choice] = [(0.0, {})]
    for number, tp in enumerate(_doubled(engine.tp, 3), 1):
        if tp * engine.pp <= (fits or per_node) or (fits and tp * engine.pp % fits == 0 and config.cluster.kind is ClusterKind.slurm):
            wider = {"allocation.replica_size": tp * engine.pp} if size % (tp * engine.pp) else {}
            found.append((3.0 * number, {"engine.parallel.tp": tp, **wider}))
    return found


def _axis(key: str, cost: float, values: Sequence[Any]) -> list[Choice]:
    """`values` in the order of their distance from what is asked for, each step of which has the same cost."""
    return [(0.0, {}), *((cost * number, {key: value}) for number, value in enumerate(values, 1))]


def _doubled(number: int, times: int) -> list[int]:
    return [number << shift for shift in range(1, times + 1)]

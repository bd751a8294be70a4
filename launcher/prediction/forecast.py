"""What a config will give: the prediction, and which other split or server would give more.

    config, architecture --costs.py--> seconds of decoding, training, new weights --steady_state.py--> tokens/s, a step's seconds, age, what limits
    every other inference_fraction and server size that is possible --the same--> the best of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.config.gpu_types import gib_of_type
from launcher.config.replica_nodes import replica_nodes
from launcher.config.schema import FullConfig
from launcher.memory.estimate import SGLANG_SHARE, published_bytes, server_memory
from launcher.memory.fit import changed
from launcher.prediction import costs
from launcher.prediction.assumptions import Assumptions
from launcher.prediction.costs import Shapes
from launcher.prediction.device_speeds import DeviceSpeed, device
from launcher.prediction.earlier_run import from_run, measured
from launcher.prediction.steady_state import Engine, Prediction, Work, predict
from workers.config import ClusterKind, ConfigError, Device, Server, require
from workers.model.architecture import Architecture
from workers.model.parallel_limits import check_engine

WORTH = 1.05
"""Another split is worth naming where it gives so many times the tokens."""
ARRIVALS = 1.5
"""A version is at all nodes after so many times what its way to one takes: each hands it on as it comes."""


@dataclass(frozen=True)
class Forecast:
    """For one config: its `prediction`; `arrival_s` of a version at all nodes; devices in all."""

    prediction: Prediction
    arrival_s: float
    num_devices: int

    def gpu_hours(self, num_steps: int) -> float:
        """Of all devices for so many steps."""
        return self.num_devices * num_steps * self.prediction.step_s / 3600


def check(config: FullConfig) -> None:
    """Raise `ConfigError` where there is nothing to predict."""
    require(not config.supervised and not config.evaluates, "run.kind", config.run.kind.value, "has no prediction",
            "It is about generation and training side by side: run.kind=rl")


def devices(config: FullConfig, assumed: Assumptions) -> tuple[DeviceSpeed, DeviceSpeed]:
    """What generates, and what trains. `config`: settled, so that it says what this machine has."""
    if config.cluster.kind is ClusterKind.slurm:
        inference, train = config.gives_gpus("inference"), config.gives_gpus("train") and config.trainer.device is not Device.cpu
    else:
        inference = train = config.trainer.device is Device.cuda
    inference = inference and config.engine.server is Server.sglang and config.engine.device != "cpu"
    return (device(inference, config.cluster.inference.gpu_type, assumed.cpu_gflops),
            device(train, config.cluster.train.gpu_type, assumed.cpu_gflops))


def of(config: FullConfig, architecture: Architecture, assumed: Assumptions) -> Forecast:
    """Predict a config that is settled and checked. Raises `ConfigError` where its devices cannot be split."""
    return _of(config, Shapes.of(architecture), assumed)


def _of(config: FullConfig, shapes: Shapes, assumed: Assumptions) -> Forecast:
    (generates, trains), split = devices(config, assumed), config.plan()
    engine, num_engines = _engine(config, shapes, generates, assumed), split.num_replicas * config.num_servers
    size = costs.weights_bytes(config, shapes)  # with weights.adapter_only it is merged on each node instead, in about that time
    published = published_bytes(config, shapes.architecture, shapes.weights)
    publish_s = published / (assumed.publish_gbs * 1e9) if assumed.publish_s is None else assumed.publish_s
    train_s = costs.training(config, shapes, trains, split.num_train_devices, assumed) + publish_s
    return Forecast(predict(engine, num_engines, work(config, assumed), train_s), ARRIVALS * size / (assumed.network_gbs * 1e9), split.num_devices)


def work(config: FullConfig, assumed: Assumptions) -> Work:
    """What a step of this config takes."""
    limit = config.rollout.concurrency
    return Work(config.staleness.eta, config.trainer.batch_groups, config.workflow.group_size, assumed.lengths,
                limit if isinstance(limit, int) else None, assumed.kept)


def _engine(config: FullConfig, shapes: Shapes, generates: DeviceSpeed, assumed: Assumptions) -> Engine:
    context = assumed.prompt_tokens + assumed.lengths.mean / 2
    gib = config.cluster.inference.gpu_memory_gb or gib_of_type(config.cluster.inference.gpu_type)
    room = costs.slots(config, shapes, gib * costs.GIB if generates.is_gpu else 0.0, context)
    fixed, each = costs.decoding(config, shapes, generates, context, assumed, config.replica_nodes)
    pause = assumed.pause_s
    if pause is None:
        again = costs.prompt_s(config, shapes, generates, room * context, assumed)
        pause = costs.weights_bytes(config, shapes) / (config.engine.parallel.unit * assumed.load_gbs * 1e9) + again
    return Engine(fixed, each, room, pause, costs.prompt_s(config, shapes, generates, assumed.prompt_tokens, assumed))


def assume(config: FullConfig, architecture: Architecture, steps: list[dict], name: str) -> Assumptions:
    """From an earlier run with this config. Raises `ConfigError`."""
    shapes, split = Shapes.of(architecture), config.plan()
    found = measured(config, steps, name)

    def ours(assumed: Assumptions) -> tuple[float, float, float]:
        generates, trains = devices(config, assumed)
        engine = _engine(config, shapes, generates, assumed)
        running = found.running * work(config, assumed).alive / (split.num_replicas * config.num_servers)
        whole_s, updates_s = (cost(config, shapes, trains, split.num_train_devices, assumed) for cost in (costs.training, costs.updating))
        return engine.rate(min(running, engine.slots)), whole_s - updates_s, updates_s

    return from_run(config, found, ours, name)


def better(config: FullConfig, architecture: Architecture, assumed: Assumptions) -> list[tuple[str, float]]:
    """Of the other splits, and of the other servers, the one that gives most: its keys, and how many times the tokens; none that is not worth it."""
    shapes = Shapes.of(architecture)
    now, found = _of(config, shapes, assumed).prediction.tokens_per_s, []
    for others in (_splits(config), _servers(config, architecture, shapes)):
        best = ("", 0.0)
        for keys, other in others:
            speed = _of(other, shapes, assumed).prediction.tokens_per_s / now
            best = max(best, (keys, speed), key=lambda choice: choice[1])
        if best[1] >= WORTH:
            found.append(best)
    return found


def _splits(config: FullConfig) -> Iterator[tuple[str, FullConfig]]:
    """Every other number of rollout workers."""
    seen = {config.plan()}
    total, size = config.allocation.num_devices, config.allocation.replica_size
    for number in range(1, total // size + 1):
        fraction = round(number * size / total, 4)
        if 0 < fraction < 1:
            with_it = changed(config, {"allocation.inference_fraction": fraction})
            try:
                split = with_it.plan()
            except ConfigError:  # no copy of the model is left for training
                continue
            if split not in seen:
                seen.add(split)
                yield f"allocation.inference_fraction={fraction:g}", with_it


def _servers(config: FullConfig, architecture: Architecture, shapes: Shapes) -> Iterator[tuple[str, FullConfig]]:
    """Servers of fewer or more GPUs that fit."""
    if config.engine.server is not Server.sglang:
        return
    gib = config.cluster.inference.gpu_memory_gb or gib_of_type(config.cluster.inference.gpu_type)
    for tp in (1, 2, 4, 8):
        keys = {"engine.parallel.tp": tp}
        if config.allocation.replica_size % (tp * config.engine.parallel.pp):
            keys["allocation.replica_size"] = tp * config.engine.parallel.pp
        other = changed(config, keys)
        try:
            check_engine(architecture, other.engine.parallel)
            other.engine.parallel.check()
            other.plan()
            replica_nodes(other)
        except ConfigError:  # the model cannot be split so, or the devices
            continue
        needed = sum(server_memory(other, architecture, shapes.weights).values())
        if tp != config.engine.parallel.tp and (not gib or needed < (config.engine.mem_fraction or SGLANG_SHARE) * gib * costs.GIB):
            yield " ".join(f"{key}={value}" for key, value in keys.items()), other

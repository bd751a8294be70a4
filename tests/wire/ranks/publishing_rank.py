"""One rank of a gang that publishes weights: python -m tests.wire.ranks.publishing_rank FOLDER RANK WORLD PORT SCENARIO...

A scenario is a layout's name, with "disk" behind it for that transport, "full" where the last rank has no room, "dies" where rank 0 dies in the
middle of a copy. Rank 0 plays the coordinator's part and a rollout worker's: it fetches what it announces, over the sockets of all ranks, and
compares.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.megatron_case import config as make_config
from tests.support.megatron_case import make_groups, train
from tests.wire.gangs import in_turn
from workers.config import ClusterKind, Config, Dtype, ParallelConfig, Transport
from workers.messages.from_coordinator import Finish
from workers.messages.from_worker import Republished
from workers.messages.parts import Announcement, Version
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives
from workers.trainer.orders import Order, PublishWeights, ShareWeights, StillThere, TrainStep, WriteWeights
from workers.trainer.ranks import Ranks
from workers.trainer.weights.announcer import Announcer
from workers.trainer.weights.rank_publisher import RankPublisher
from workers.transport.weights.fetcher import FetchProgress, fetch
from workers.transport.weights.messages import WeightKeys
from workers.weights.manifest import WeightsError, verify
from workers.weights.store import NodeStore

LAYOUTS: dict[str, tuple[str, ParallelConfig]] = {
    "one": ("qwen2", ParallelConfig()),
    "pp2": ("qwen3-tied", ParallelConfig(pp=2)),
    "tp2": ("llama", ParallelConfig(tp=2)),
    "dp2": ("qwen2", ParallelConfig()),
    "ep2": ("qwen3moe", ParallelConfig(ep=2)),
    "tp2ep2": ("qwen3moe", ParallelConfig(tp=2, ep=2)),
    "tp2pp2": ("qwen3moe", ParallelConfig(tp=2, pp=2)),
}
SOURCES = {"pp2": 2, "ep2": 2, "tp2ep2": 2, "tp2pp2": 2}


class Link:
    """The coordinator's side: what it has been told."""

    def __init__(self) -> None:
        self.needed: Version | None = None
        self.fallbacks: dict[str, str] = {}
        self.announced: list[Announcement] = []
        self.metrics: list[dict[str, float]] = []
        self.woken = threading.Event()

    def step_finished(self, announcement: Announcement, metrics: dict[str, float]) -> None:
        self.announced.append(announcement)
        self.metrics.append(metrics)

    def say(self, message: Republished) -> None:
        self.announced.append(message.announcement)

    def wake(self) -> None:
        self.woken.set()


def setup(folder: Path, layout: str, disk: bool) -> Config:
    kind, parallel = LAYOUTS[layout]
    config = make_config(num_minibatches=1)
    config.model.path, config.trainer.parallel, config.engine.dtype = str(folder / kind), parallel, Dtype.bfloat16
    config.weights.dir, config.weights.delta, config.weights.chunk_mb = str(folder / "stores"), True, 1
    config.cluster.kind, config.run.num_steps = ClusterKind.slurm, 4
    config.weights.transport = Transport.disk if disk else Transport.zmq
    return config


class Rollout:
    """A rollout worker on another node: fetches from where the announcement says."""

    def __init__(self, run: RunFolder, config: Config, folder: Path) -> None:
        self._store, self._weights, self._keys = NodeStore(folder), config.weights, WeightKeys.read(run)
        self.progress = FetchProgress()

    def fetch(self, announcement: Announcement) -> dict[str, Tensor]:
        def note(progress: FetchProgress) -> None:
            self.progress = progress

        return tensors_in(fetch(announcement, [], self._store, self._weights, self._keys, cancelled=threading.Event(), report=note))

    def close(self) -> None:
        self._store.leave()


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the bit, in what the engines hold."""
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor.to(torch.bfloat16))] == []


class RankZero:
    """Publishes what the engine holds, and trains in between."""

    def __init__(self, run: RunFolder, config: Config, engine: MegatronEngine, ranks: Ranks, epoch: int = 1) -> None:
        self.run, self.config, self.engine, self.ranks, self.epoch, self.link = run, config, engine, ranks, epoch, Link()
        publisher = RankPublisher(run, config, engine, epoch, self.link.wake)
        self.announcer = Announcer(run, config, cast(CoordinatorLink, self.link), ranks, publisher)

    def publish(self, step: int) -> dict[str, Tensor]:
        """Begin to publish; returns what the engine holds."""
        self.announcer.publish(Version(self.epoch, step), {})
        return self.weights()

    def weights(self) -> dict[str, Tensor]:
        self.ranks.tell(WriteWeights())
        return {name: tensor.clone() for name, tensor in self.engine.iter_hf_tensors()}

    def train(self, step: int) -> None:
        self.ranks.tell(TrainStep(step))
        train(self.engine, make_groups(4, seed=step))


def publish(folder: Path, layout: str, run: RunFolder, config: Config, engine: MegatronEngine, ranks: Ranks) -> None:
    zero = RankZero(run, config, engine, ranks)
    link = zero.link
    rollout = Rollout(run, config, folder / f"{layout}.rollout")
    for step in range(3):
        expected = zero.publish(step)
        zero.train(step)  # beside it
        zero.announcer.wait()
        announcement = link.announced[-1]
        assert announcement.version == Version(1, step) and announcement.folder == "" and link.woken.is_set()
        assert len(set(announcement.sources)) == len(announcement.sources) == SOURCES.get(layout, 1)
        assert_equal(rollout.fetch(announcement), expected)
        link.needed = announcement.version
    assert rollout.progress.num_deltas > 0
    store = run.store(config.weights.dir)
    present = sorted(path.name for path in (store / "published").iterdir() if not path.name.startswith("."))
    assert present == ["1.1", "1.2", "1.3"], "the newest two, and the one that is prepared"
    metrics = link.metrics[-1]
    assert metrics["weights_bytes"] > metrics["weights_delta_bytes"] > 0 and metrics["publish_s"] > 0 and metrics["publish_background_s"] > 0
    assert metrics["weights_sent_bytes"] > 0, "of the version before"
    fall_back(zero, expected)
    rollout.close()
    zero.announcer.close()


def fall_back(zero: RankZero, expected: dict[str, Tensor]) -> None:
    """A worker cannot get weights by zmq: the present version at once, and those that follow."""
    link = zero.link
    zero.announcer.attend()
    assert len(link.announced) == 3, "nobody wants another way"
    link.fallbacks["zmq"] = "no route"
    zero.announcer.attend()
    zero.announcer.wait()
    zero.announcer.attend()
    republished = link.announced[-1]
    assert len(link.announced) == 4 and republished.version == Version(1, 2) and republished.sources == link.announced[2].sources
    for announcement, weights in ((republished, expected), (None, None)):
        if announcement is None or weights is None:
            weights = zero.publish(3)
            zero.announcer.wait()
            announcement = link.announced[-1]
            assert announcement.version == Version(1, 3) and announcement.sources
        place = Path(announcement.folder)
        assert place == zero.run.path / "weights" / str(announcement.version)
        verify(place, announcement.version, announcement.digest)
        assert_equal(tensors_in(place), weights)


def disk(folder: Path, layout: str, run: RunFolder, config: Config, engine: MegatronEngine, ranks: Ranks) -> None:
    """By way of the nodes' memory onto shared storage: nothing is served, and a version stays in memory no longer than that takes."""
    zero, shared = RankZero(run, config, engine, ranks), run.weights(config.weights.dir)
    for step in range(4):
        expected = zero.publish(step)
        zero.announcer.wait()
        announcement = zero.link.announced[-1]
        assert announcement.sources == [] and Path(announcement.folder) == shared / f"1.{step}"
        verify(Path(announcement.folder), announcement.version, announcement.digest)
        assert_equal(tensors_in(Path(announcement.folder)), expected)
        zero.link.needed = announcement.version
        zero.train(step)
    assert sorted(path.name for path in shared.iterdir()) == ["1.2", "1.3"]
    zero.announcer.close()


def full(folder: Path, layout: str, run: RunFolder, config: Config, engine: MegatronEngine, ranks: Ranks) -> None:
    """The last rank has no room: nothing is announced, and the cause says where and what to do."""
    zero = RankZero(run, config, engine, ranks)
    zero.publish(0)
    assert zero.link.woken.wait(60), "training may be waiting for a batch"
    try:
        zero.announcer.attend()
    except WeightsError as error:
        text = str(error)
    assert zero.link.announced == []
    assert "weights cannot be published. training rank 1 on " in text and "weights.dir: " in text and "Free some memory" in text, text
    zero.announcer.close()


def dies(folder: Path, layout: str, run: RunFolder, config: Config, engine: MegatronEngine, ranks: Ranks) -> None:
    """The first incarnation is killed in the middle of a copy; the next one takes over. The store is in use by another process."""
    epoch = run.newest_epoch()
    zero = RankZero(run, config, engine, ranks, epoch)
    published = run.store(config.weights.dir) / "published"
    if epoch == 1:
        zero.publish(0)
        zero.announcer.wait()
        held = engine.iter_held_tensors

        def until_death() -> Iterator[tuple[str, Tensor]]:
            for number, entry in enumerate(held()):
                if number == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield entry

        cast(Any, engine).iter_held_tensors = until_death
        zero.publish(1)
    assert {path.name for path in published.iterdir()} == set(), "nothing of what the one before left"
    expected = zero.publish(0)
    zero.announcer.wait()
    rollout = Rollout(run, config, folder / "rollout")
    assert_equal(rollout.fetch(zero.link.announced[-1]), expected)
    rollout.close()
    zero.announcer.close()


def follow(run: RunFolder, config: Config, engine: MegatronEngine) -> None:
    publisher, decoder = RankPublisher(run, config, engine, 1), msgspec.msgpack.Decoder(Order)
    while True:
        match order := decoder.decode(collectives.broadcast_bytes(None)):
            case PublishWeights():
                publisher.publish(order)
            case ShareWeights():
                publisher.share(order)
            case TrainStep():
                train(engine, make_groups(4, seed=order.step))
            case WriteWeights():
                assert not list(engine.iter_hf_tensors())
            case Finish():
                publisher.close()
                return
            case StillThere():
                pass


def main() -> None:
    os.umask(0o077)
    folder, rank, world, port, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    for scenario, gang in in_turn(scenarios, int(rank), int(world), int(port)):
        layout, _, kind = scenario.partition(".")
        run, config, ranks = RunFolder(Path(folder) / scenario), setup(Path(folder), layout, kind == "disk"), Ranks(gang)
        if gang.rank == 0:
            incarnations.claim(run, "", "", 0, "node", os.getpid(), 0)
        elif kind == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        engine = MegatronEngine(config, Path(config.model.path), gang)
        if gang.rank:
            follow(run, config, engine)
            continue
        {"": publish, "disk": disk, "full": full, "dies": dies}[kind](Path(folder), layout, run, config, engine, ranks)
        ranks.tell(Finish(""))
        print("done", scenario)


if __name__ == "__main__":
    main()

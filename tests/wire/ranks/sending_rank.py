"""One rank of a gang that sends weights: python -m tests.wire.ranks.sending_rank FOLDER RANK WORLD PORT STORE_PORT SCENARIO...

A scenario is a layout's name, with "slices" or "whole" behind it: what the engines take. Each is gone through twice, with a training step
before, and the first time of "slices" one of the engine's ranks dies in the middle. Rank 0 plays the coordinator's part, and tells the engine's
ranks (receiving_rank.py) through the store at STORE_PORT.
"""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.support.megatron_case import config as make_config
from tests.support.megatron_case import make_groups, train
from tests.support.published import Publisher
from tests.wire.gangs import in_turn
from workers.config import Config, Dtype, ParallelConfig, Server
from workers.messages.broadcasts import Broadcast, BroadcastWanted, OpenUpdateGroup, UpdateGroupBroken, UpdateGroupJoined, UpdateGroupOpened
from workers.messages.from_coordinator import Finish
from workers.messages.parts import Message, Version
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives
from workers.trainer.orders import BroadcastWeights, Order, TrainStep, WriteWeights
from workers.trainer.ranks import Ranks
from workers.trainer.weights.broadcast import WeightGroup
from workers.trainer.weights.lanes import Lanes
from workers.weights.update_group import GroupError, store_at

LAYOUTS: dict[str, tuple[str, ParallelConfig, int]] = {
    "tp2pp2dp2": ("qwen2-tied", ParallelConfig(tp=2, pp=2), 8),
    "ep2": ("qwen3moe", ParallelConfig(ep=2), 2),
}
"""Kind of model, layout, and how many ranks it takes."""
TP = 4
"""Ranks of the engine."""
BUCKET_BYTES = 4000
WAIT_S = 60.0


def setup(folder: Path, layout: str, whole: bool) -> Config:
    kind, parallel, _ = LAYOUTS[layout]
    config = make_config(num_minibatches=1)
    config.model.path, config.trainer.parallel, config.engine.dtype = str(folder / kind), parallel, Dtype.bfloat16
    config.engine.server, config.weights.timeout_s, config.transport.interface = Server.sglang if whole else Server.embedded, WAIT_S, "127.0.0.1"
    return config


class RankZero:
    """Sends what the engine holds; the coordinator's answers are given at once."""

    def __init__(self, folder: Path, config: Config, engine: MegatronEngine, ranks: Ranks, lanes: Lanes, store: dist.Store) -> None:
        self.engine, self.ranks, self.store, self.heard = engine, ranks, store, queue.SimpleQueue[Message]()
        self.publisher = Publisher(folder, Path(config.model.path), torch.bfloat16)
        self.group = WeightGroup(lanes, ranks, self._hear)
        self.name = ""

    def _hear(self, message: Message) -> None:
        if isinstance(message, BroadcastWanted):
            self.group.take(Broadcast(self.name, message.version))
        else:
            self.heard.put(message)

    def open(self, name: str) -> UpdateGroupOpened:
        self.name = name
        self.group.take(OpenUpdateGroup(name, 1 + TP))
        opened = self.heard.get(timeout=WAIT_S)
        assert isinstance(opened, UpdateGroupOpened) and opened.group == name
        return opened

    def joined(self) -> None:
        assert self.heard.get(timeout=WAIT_S) == UpdateGroupJoined(self.name)

    def published(self, step: int) -> Path:
        """The same as weights=disk brings."""
        self.ranks.tell(WriteWeights())
        return Path(self.publisher.publish(self.engine.iter_hf_tensors(), Version(1, step)).folder)

    def train(self, step: int) -> None:
        self.ranks.tell(TrainStep(step))
        train(self.engine, make_groups(8, seed=step))

    def say(self, key: str, content: bytes) -> None:
        self.store.set(key, content.decode("latin1"))


def send(scenario: str, folder: Path, config: Config, engine: MegatronEngine, ranks: Ranks, lanes: Lanes, store: dist.Store) -> None:
    zero, dies = RankZero(folder / f"{scenario}.published", config, engine, ranks, lanes, store), scenario.endswith("slices")
    for step in range(2):
        zero.train(step)
        opened = zero.open(f"{scenario}-{step}")
        zero.say(f"{scenario}/{step}/opened", msgspec.msgpack.encode(opened))
        zero.joined()
        folder_of_version = zero.published(step)
        zero.say(f"{scenario}/{step}/published", str(folder_of_version).encode())
        sent = zero.group.broadcast(Version(1, step))["broadcast_bytes"]
        if dies and step == 0:
            assert sent == 0 and isinstance(zero.heard.get(timeout=WAIT_S), UpdateGroupBroken)
            assert zero.group.broadcast(Version(1, step))["broadcast_bytes"] == 0, "there is no group"
            continue
        assert sent == sum(tensor.nbytes for file in folder_of_version.glob("*.safetensors") for tensor in load_file(file).values())
        store.wait([f"{scenario}/{step}/{rank}" for rank in range(TP)])
    print("done", scenario, lanes.plan.senders, lanes.plan.sent, len(lanes.plan.buckets))
    ranks.tell(Finish(""))


def follow(engine: MegatronEngine, lanes: Lanes) -> None:
    decoder = msgspec.msgpack.Decoder(Order)
    while True:
        match order := decoder.decode(collectives.broadcast_bytes(None)):
            case TrainStep():
                train(engine, make_groups(8, seed=order.step))
            case WriteWeights():
                assert not list(engine.iter_hf_tensors())
            case BroadcastWeights():
                try:
                    lanes.broadcast(order.group)
                except GroupError as error:
                    print("not sent:", error)
            case Finish():
                return


def main() -> None:
    folder, rank, world, port, store_port, *scenarios = sys.argv[1:]
    torch.set_num_threads(1)
    for scenario, gang in in_turn(scenarios, int(rank), int(world), int(port)):
        layout, _, takes = scenario.partition(".")
        config = setup(Path(folder), layout, takes == "whole")
        engine = MegatronEngine(config, Path(config.model.path), gang)
        lanes = Lanes(config, engine.architecture, engine.iter_shards, BUCKET_BYTES)
        if gang.rank:
            follow(engine, lanes)
        else:
            send(scenario, Path(folder), config, engine, Ranks(gang), lanes, store_at("127.0.0.1", int(store_port), WAIT_S))
        lanes.close(WAIT_S)


if __name__ == "__main__":
    main()

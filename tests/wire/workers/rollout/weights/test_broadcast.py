"""Weights by broadcast: the trainer's side, the workers' side and real engines, over gloo. What the coordinator decides is broadcast_group.py's; here
its messages are carried by hand. Nothing of what goes wrong keeps the trainer, and every server holds the version in the end."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file

pytest.importorskip("megatron.core")

from tests.support.published import Publisher
from tests.wire.workers.rollout.engines.test_sampler import OnThisNode, counters, engine_config, write_endless_model
from workers.config import Config, EngineConfig, ModelConfig, Transport
from workers.coordinator.weights import broadcast_group
from workers.coordinator.weights.broadcast_group import Phase, Sending, UpdateGroup
from workers.messages.broadcasts import BroadcastReady, BroadcastWanted, UpdateGroupBroken, UpdateGroupJoined, UpdateGroupOpened
from workers.messages.parts import Announcement, Message, Version
from workers.model.architecture import read_architecture
from workers.rollout.engines.client import SamplingParams
from workers.rollout.engines.engine import Engine
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.servers.process import ServerProcess
from workers.rollout.weights import nccl
from workers.rollout.weights.broadcast import GroupMember, membership
from workers.rollout.weights.updates import WeightHolder
from workers.trainer.megatron.hf_conversion import Shard
from workers.trainer.megatron.parallel import process_group
from workers.trainer.ranks import Ranks
from workers.trainer.weights.broadcast import WeightGroup
from workers.trainer.weights.lanes import CloseLanes, Lanes

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEADLINE_S = 200.0
TIMEOUT_S = 20.0
BUCKET_BYTES = 40_000
TRAINER = b"trainer"


class Worker:
    """A worker's engines, weight holder and place in groups."""

    def __init__(self, rig: Rig, name: str, config: Config) -> None:
        self.name = name.encode()
        self.holder = WeightHolder(OnThisNode(), self._changed)
        self.engines = Engines(config, lambda index: rig.spawn(config.engine, rig.model, rig.folder / f"{name}-{index}.log"),
                               lambda: self.holder.newest, self._changed)
        member = membership(config, self.engines.engines, self.holder, lambda message: rig.hear(self.name, message))
        assert member is not None
        self.member: GroupMember = member
        self.holder.arriving = member.arriving

    @property
    def parts(self) -> list:
        return [self.engines.live(), self.holder.follow(self.engines), self.member.live()]

    async def _changed(self) -> None:
        self.member.look()


class Rig:
    """Trainer, coordinator's state and workers in this process; the servers are processes of their own."""

    def __init__(self, folder: Path, **engine: Any) -> None:
        self.folder, self.model = folder, write_endless_model(folder / "model", 0)
        self.spawn: Callable[[EngineConfig, Path, Path], ServerProcess] = ServerProcess
        self.publisher = Publisher(folder / "weights", self.model, torch.float32)
        self.config = Config(model=ModelConfig(path=str(self.model)), engine=engine_config(max_restarts=20, **{"health_timeout_s": 15.0, **engine}))
        self.config.weights.transport, self.config.weights.timeout_s, self.config.transport.interface = Transport.nccl, TIMEOUT_S, "127.0.0.1"
        self.architecture = read_architecture(self.model)
        self.group, self.workers = UpdateGroup(1), dict[bytes, Worker]()
        self.version = Version(1, 0)
        self.weights = load_file(self.model / "model.safetensors")
        self.before: Callable[[int], None] = lambda number: None
        self.loop = asyncio.get_running_loop()
        self.lanes = Lanes(self.config, self.architecture, self.shards, BUCKET_BYTES)
        self.trainer = WeightGroup(self.lanes, Ranks(), self.from_trainer)
        self.tasks: list[asyncio.Task] = []

    async def add(self, name: str, num_servers: int = 1) -> Worker:
        """A worker that runs, and holds the present version."""
        config = Config(model=self.config.model, engine=self.config.engine, weights=self.config.weights, transport=self.config.transport)
        config.allocation.replica_size = num_servers
        worker = Worker(self, name, config)
        self.tasks += [asyncio.create_task(part) for part in worker.parts]
        worker.holder.announce(self.announcement)
        await self.until(lambda: all(engine.held == self.version for engine in worker.engines.engines))
        self.workers[worker.name] = worker
        return worker

    async def end(self) -> None:
        """End the workers, and their servers."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    @property
    def servers(self) -> list[Engine]:
        return [engine for worker in self.workers.values() for engine in worker.engines.engines]

    # -- the trainer ---------------------------------------------------------------------------------------------------

    def shards(self, sending: Iterable[tuple[Shard, int]]) -> Iterator[list[torch.Tensor]]:
        for number, (shard, _) in enumerate(sending):
            self.before(number)
            yield [self.weights[piece.name] for piece in shard.pieces]

    def publish(self) -> None:
        """Other weights, as files too; they are announced only when `announce` is called."""
        self.version = Version(1, self.version.step + 1)
        generator = torch.Generator().manual_seed(self.version.step)
        self.weights = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in self.weights.items()}
        self.announcement: Announcement = self.publisher.publish(self.weights.items(), self.version)

    async def broadcast(self) -> float:
        """As the trainer does; the bytes that were sent to all."""
        return (await asyncio.to_thread(self.trainer.broadcast, self.version))["broadcast_bytes"]

    async def deliver(self) -> None:
        """Another version comes to all servers by broadcast, to the bit, and is announced."""
        self.publish()
        assert await self.broadcast() == sum(tensor.nbytes for tensor in self.weights.values())
        await self.check()
        self.announce()

    def announce(self) -> None:
        for worker in self.workers.values():
            worker.holder.announce(self.announcement)
        self.group.announced(0.0)

    def from_trainer(self, message: Message) -> None:
        asyncio.run_coroutine_threadsafe(self.hear(TRAINER, message), self.loop)

    # -- the coordinator -----------------------------------------------------------------------------------------------

    async def hear(self, peer: bytes, message: Message) -> None:
        match message:
            case UpdateGroupOpened():
                self.carry(self.group.opened(message))
            case BroadcastWanted():
                self.carry(self.group.wanted(TRAINER, message.version, self.fleet(), 0.0))
            case UpdateGroupJoined():
                self.carry(self.group.joined(peer, message.group))
            case UpdateGroupBroken():
                self.carry(self.group.broken(peer, peer.decode(), message.group, message.cause))
            case BroadcastReady():
                self.carry(self.group.ready(peer, message))

    def fleet(self) -> dict[bytes, int]:
        return {name: worker.member.ranks for name, worker in self.workers.items() if worker.member.ranks}

    def carry(self, sending: Sending) -> None:
        for peer, message in sending:
            assert peer is not None
            (self.trainer if peer == TRAINER else self.workers[peer].member).take(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                for task in self.tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.01)

    async def stand(self) -> None:
        """Have a group of all workers made, whatever has been before."""
        self.group._absences = broadcast_group.Absences()
        await self.until(lambda: all(engine.held == self.version for engine in self.servers))
        self.group.announced(0.0)
        self.carry(self.group.consider(TRAINER, self.fleet(), True, 0.0))
        await self.until(lambda: self.group.phase is Phase.standing)
        assert set(self.group.members.ranks) == set(self.workers)

    async def check(self) -> None:
        """All servers hold the version, to the bit: given the same by its files, they say the same."""
        await self.until(lambda: all(engine.held == self.version for engine in self.servers))
        prompt = [50 + self.version.step, 7, 8, 9]
        said = [await self.sampled(engine, prompt) for engine in self.servers]
        assert said == [said[0]] * len(self.servers)
        for engine in self.servers[:1]:
            assert engine.client is not None
            await engine.client.update_weights(Path(self.announcement.folder), self.version, True)
            assert await self.sampled(engine, prompt) == said[0]

    async def sampled(self, engine: Engine, prompt: list[int]) -> tuple[list[int], list[float]]:
        assert engine.client is not None
        found = await engine.client.generate(f"{engine.name}-{self.version}", prompt, SamplingParams(24, 0.0), seed=3)
        assert found.spans == [(self.version, 0, 24)]
        return found.tokens, found.logprobs


@asynccontextmanager
async def running(folder: Path, **engine: Any) -> AsyncIterator[Rig]:
    process_group.initialize()
    rig = Rig(folder, **engine)
    rig.publish()
    try:
        yield rig
    finally:
        await asyncio.to_thread(rig.trainer.close, 10.0)
        await rig.end()
        process_group.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with running(tmp_path_factory.mktemp("weight_group")) as rig:
        await asyncio.gather(rig.add("one", 2), rig.add("two"))
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    yield shared
    shared.before = lambda number: None


def server_pid(engine: Engine) -> int:
    assert engine._process is not None and engine._process._process is not None
    return engine._process._process.pid


async def test_every_server_gets_the_weights_to_the_bit(rig: Rig) -> None:
    await rig.stand()
    for _ in range(2):
        await rig.deliver()
        assert len(rig.lanes.plan.buckets) > 5
        assert all(worker.holder.by_broadcast and worker.holder.newest is None for worker in rig.workers.values())


async def test_servers_with_another_nccl_are_not_asked_to_join(rig: Rig, tmp_path: Path) -> None:
    """NCCL would neither form the group nor say why. The trainer's version is made up here, and a worker's is what its interpreter says."""
    await rig.stand()
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"torch": "2.14.1", "cuda": "13.0", "nccl": "2.30.7", "driver": "580.1", "gpus": []}'\n""")
    python.chmod(0o755)
    for worker in rig.workers.values():
        worker.member._nccl = asyncio.create_task(nccl.version_of(str(python)))
    assert await nccl.version_of("/no/such/python") == "" == await nccl.version_of("/bin/true")
    try:
        for version, phase in (("2.29.7", Phase.none), ("2.30.7", Phase.standing)):
            rig.trainer._library, made = version, rig.group.group
            rig.group._absences, rig.group.members.ranks = broadcast_group.Absences(), {}  # another group is due
            rig.group.announced(0.0)
            rig.carry(rig.group.consider(TRAINER, rig.fleet(), True, 0.0))
            await rig.until(lambda made=made, phase=phase: rig.group.group != made and rig.group.phase is phase)
            assert (phase is Phase.standing) or "the trainer has NCCL 2.29.7, and the servers here have 2.30.7" in rig.group.cause
        rig.publish()
        assert await rig.broadcast()
        await rig.check()
        rig.announce()
    finally:
        rig.trainer._library = ""


async def test_what_is_running_goes_on_under_the_new_weights(rig: Rig) -> None:
    await rig.stand()
    server, old = rig.servers[0], rig.version
    assert server.client is not None
    rig.publish()
    before = await counters(server.client)
    running = asyncio.create_task(server.client.generate("long", [1, 2, 3], SamplingParams(900, 1.0), seed=3))
    while (await counters(server.client))["generated_tokens"] == before["generated_tokens"]:
        pass
    await rig.broadcast()
    spans = (await running).spans
    assert [version for version, _, _ in spans] == [old, rig.version] and spans[-1][2] == 900
    rig.announce()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
async def test_a_server_that_is_lost_in_the_middle_keeps_neither_trainer_nor_servers(rig: Rig, end: signal.Signals) -> None:
    await rig.stand()
    rig.publish()
    victim = rig.servers[-1]
    pid, lives = server_pid(victim), victim.num_restarts
    rig.before = lambda number: os.kill(pid, end) if number == 5 else None
    await rig.broadcast()
    rig.before = lambda number: None
    rig.announce()
    await rig.check()
    assert victim.num_restarts > lives, "it was started again, and has got them as files"
    await rig.stand()
    rig.publish()
    assert await rig.broadcast()
    await rig.check()


async def test_a_broadcast_that_the_trainer_breaks_off_leaves_no_server_with_half_of_it(rig: Rig) -> None:
    await rig.stand()
    rig.publish()

    def breaks(number: int) -> None:
        if number == 9:
            raise FloatingPointError("the trainer has failed")

    rig.before = breaks
    with pytest.raises(FloatingPointError):
        await rig.broadcast()
    rig.lanes.leave(CloseLanes(rig.group.group, "the trainer has failed"))
    rig.before = lambda number: None
    assert await rig.broadcast() == 0, "there is no group"
    rig.announce()
    await rig.check()


async def test_without_a_standing_server_nothing_is_broadcast_and_all_go_on(rig: Rig) -> None:
    await rig.stand()
    rig.publish()
    victim, held = rig.servers[0], rig.servers[1].held
    async with victim._loading:  # it loads something else just now
        sending = asyncio.create_task(rig.broadcast())
        await rig.until(lambda: rig.group.phase is Phase.preparing)
        rig.carry(rig.group.expire({}, broadcast_group.PREPARE_S + 1))
        assert await sending == 0
    await rig.until(lambda: all(worker.member._idle.is_set() for worker in rig.workers.values()))
    assert [engine.held for engine in rig.servers] == [held] * len(rig.servers)
    rig.announce()
    await rig.check()


async def test_a_joiner_gets_files_first_and_then_its_place(rig: Rig) -> None:
    await rig.stand()
    adding = asyncio.create_task(rig.add("three"))
    rig.publish()
    present = rig.announcement
    assert await rig.broadcast(), "nobody waits for it"
    rig.announce()
    joiner = await adding
    joiner.holder.announce(present)
    await rig.check()
    await rig.stand()
    assert rig.group.members.num_ranks == 5
    rig.publish()
    assert await rig.broadcast()
    await rig.check()


async def test_servers_that_were_started_together_leave_signals_to_the_worker(rig: Rig) -> None:
    assert len(rig.servers) > 2 and signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()

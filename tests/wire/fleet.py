"""A coordinator that tests play by hand, over real sockets, and real rollout workers for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file

from tests.support.published import Publisher
from tests.wire.workers.rollout.engines.test_sampler import write_endless_model
from workers.config import (
    ClusterConfig,
    ClusterKind,
    Config,
    EngineConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    Server,
    TransportConfig,
    WorkflowConfig,
)
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import Acknowledged, HeartbeatReply, Leases, LoadGranted, Welcome
from workers.messages.from_worker import Draining, GroupFailed, GroupFinished, GroupParked, GroupRejected, Heartbeat, LoadRequest, Register
from workers.messages.parts import Announcement, Lease, Message, Partial, Purpose, Version
from workers.rollout.worker import RolloutWorker
from workers.run.folder import RunFolder
from workers.slurm.termination import Termination
from workers.transport.keys import make_keys, read_keys
from workers.transport.rendezvous import Address, publish
from workers.transport.server import ServerSockets

DEADLINE_S = 200.0
CONTEXT = 1024
TRANSPORT = TransportConfig(heartbeat_s=0.1, heartbeat_timeout_s=30.0)
BEGINNING = Version(1, 0)
Kind = TypeVar("Kind", bound=Message)


def make_run(folder: Path) -> RunFolder:
    run = RunFolder.create(folder)
    make_keys(run)
    return run


def make_config(model: Path, *, server: Server = Server.synthetic, local: bool = False, max_new_tokens: int = 600, num_slots: int = 8,
                idle_s: float = 60.0, tokens_per_s: float = 800.0) -> Config:
    """Groups of three; with the synthetic engine a sample of the greatest length takes some seconds."""
    return Config(
        cluster=ClusterConfig(kind=ClusterKind.local if local else ClusterKind.slurm, signal_delay_s=30), model=ModelConfig(path=str(model)),
        workflow=WorkflowConfig(group_size=3, max_new_tokens=max_new_tokens, temperature=0.8),
        reward=RewardConfig(verifier="numeric_distance"), rollout=RolloutConfig(max_idle_minutes=idle_s / 60),
        engine=EngineConfig(server=server, num_slots=num_slots, context_length=CONTEXT, prefill_chunk=64, start_timeout_s=DEADLINE_S,
                            synthetic_tokens_per_s=tokens_per_s, synthetic_mean_tokens=1e6),
        transport=TRANSPORT)


def make_lease(group_id: str = "g1", attempt: int = 0, *, version: Version = BEGINNING, purpose: Purpose = Purpose.training,
               partial: Partial | None = None) -> Lease:
    return Lease(group_id, attempt, purpose, version, "p1", "12 + 30 =", "numeric_distance", "42", 7 + int(group_id[1:].rpartition(".")[2]), partial)


class Weights:
    """Published versions of random models that never end an answer by themselves."""

    def __init__(self, folder: Path) -> None:
        self.models = [write_endless_model(folder / str(seed), seed) for seed in range(2)]
        self.publisher = Publisher(folder / "weights", self.models[0], torch.float32)

    def publish(self, version: Version, seed: int = 0) -> Announcement:
        return self.publisher.publish(load_file(self.models[seed] / "model.safetensors").items(), version)


class Play:
    """One incarnation of a coordinator: welcomes, answers heartbeats, acknowledges each result as accepted once (unless `deaf`). `under_way`: leases
    that it has just given when a worker says that it leaves, and which take a moment to come."""

    def __init__(self, run: RunFolder, epoch: int, announcement: Announcement | None = None) -> None:
        self.server = ServerSockets(TRANSPORT, read_keys(run, "server"), read_keys(run, "client").public)
        publish(run, Address(epoch, self.server.router_endpoint, self.server.publisher_endpoint))
        self.epoch, self.announcement = epoch, announcement
        self.deaf = False
        self.under_way: list[Lease] = []
        self.peer = b""
        self.received: list[Message] = []
        self.accepted: list[tuple[str, int]] = []
        self._arrived = asyncio.Event()
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            self.peer, message = await self.server.receive()
            assert not isinstance(message, MessageError), message
            self.received.append(message)
            match message:
                case Register():
                    await self.say(Welcome(self.epoch, self.announcement))
                case Heartbeat():
                    await self.say(HeartbeatReply(self.announcement, known=True))
                case Draining() if self.under_way:
                    await asyncio.sleep(0.3)
                    await self.lease(*self.under_way)
                case LoadRequest():
                    await self.say(LoadGranted(message.version))
                case GroupFinished() if not self.deaf:
                    await self._acknowledge(message.group.group_id, message.group.attempt)
                case GroupParked() if not self.deaf:
                    await self._acknowledge(message.partial.group_id, message.partial.attempt)
                case GroupFailed() | GroupRejected() if not self.deaf:
                    await self._acknowledge(message.group_id, message.attempt)
            self._arrived.set()

    async def _acknowledge(self, group_id: str, attempt: int) -> None:
        new = (group_id, attempt) not in self.accepted
        if new:
            self.accepted.append((group_id, attempt))
        await self.say(Acknowledged(group_id, attempt, new))

    async def say(self, message: Message) -> None:
        await self.server.send(self.peer, message)

    async def lease(self, *leases: Lease) -> None:
        await self.say(Leases(list(leases)))

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [message for message in self.received if isinstance(message, kind)]

    async def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds of what has arrived. Raises TimeoutError."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._arrived.clear()
                await self._arrived.wait()

    async def until_ready(self) -> Heartbeat:
        """Wait until the worker takes leases and holds the announced weights."""
        def ready() -> bool:
            beats = self.all(Heartbeat)
            held = None if self.announcement is None else self.announcement.version
            return bool(beats) and beats[-1].capacity > 0 and beats[-1].held == held

        await self.until(ready)
        return self.all(Heartbeat)[-1]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.server.close()
        for _ in range(5):  # pyzmq's authenticator lets go of its file descriptor later; the next sockets may get the same number
            await asyncio.sleep(0)


@asynccontextmanager
async def playing(run: RunFolder, epoch: int, announcement: Announcement | None = None) -> AsyncIterator[Play]:
    play = Play(run, epoch, announcement)
    try:
        yield play
    finally:
        await play.close()


@asynccontextmanager
async def working(run: RunFolder, config: Config) -> AsyncIterator[tuple[RolloutWorker, asyncio.Task[Termination]]]:
    """A worker at work; what it has not ended by itself is cancelled."""
    worker = RolloutWorker(run, config)
    task = asyncio.create_task(worker.work())
    try:
        yield worker, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(task: asyncio.Task[Termination]) -> Termination:
    return await asyncio.wait_for(asyncio.shield(task), DEADLINE_S)


async def generated(worker: RolloutWorker, num_tokens: int) -> None:
    """Wait until the worker's engine has generated so many tokens since its start."""
    async with asyncio.timeout(DEADLINE_S):
        while (await engine_state(worker))["generated_tokens"] < num_tokens:
            await asyncio.sleep(0)


async def engine_state(worker: RolloutWorker) -> dict[str, Any]:
    assert worker._engines is not None
    client = worker._engines.engines[0].client
    assert client is not None
    return await client._call("GET", "/server_info", None)

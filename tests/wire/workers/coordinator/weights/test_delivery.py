"""New weights on their way through a fleet: the real coordinator, the trainer's real weight server, and workers as processes of their own."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.workers.coordinator.test_core import TRAINER, Prompts
from tests.wire.fetching_worker import make_config
from tests.wire.weight_nodes import PROJECT, Origin, make_weights, step
from workers.coordinator.core import Coordinator
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import FallbackWanted
from workers.messages.from_worker import Register, Republished, StepFinished
from workers.messages.parts import Announcement, Message, Role, Version
from workers.run.digests import digest_of
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys, read_keys
from workers.transport.rendezvous import Address, publish
from workers.transport.server import ServerSockets
from workers.weights.manifest import MANIFEST
from workers.weights.partial_version import Incoming

WAIT_S = 60.0
V0, V1, V2, V3 = (Version(1, number) for number in range(4))
FIRST = make_weights(1)
BYTES = FIRST.nbytes


class Node:
    """A worker's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(line.decode().strip())
            self._news.set()

    async def says(self, text: str) -> str:
        """Wait until it has printed a line that begins with `text`."""
        async with asyncio.timeout(WAIT_S):
            while (found := next((line for line in self.lines if line.startswith(text)), None)) is None:
                assert self.process.returncode is None, self.lines
                self._news.clear()
                await self._news.wait()
        return found

    async def holds(self, version: Version, weights: np.ndarray, way: str = "zmq") -> None:
        """Wait until it has loaded `version`, with these weights to the bit."""
        assert await self.says(f"held {version} ") == f"held {version} {way} {digest_of(weights.tobytes())}"

    def load(self) -> None:
        """Let it load, if it is gated."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"load\n")

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def end(self) -> None:
        if self.process.returncode is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            async with asyncio.timeout(WAIT_S):
                assert await self.process.wait() == 0, self.lines
        await self._reading


class Fleet:
    """The coordinator, the trainer's server, and the workers of one run."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        self.run, self.folder, self.changes = RunFolder.create(folder / "run"), folder, changes
        make_keys(self.run)
        config = make_config("auto", changes)
        config.transport.reconnect_grace_s = 0.5
        config.cluster.kind = config.cluster.kind.slurm  # workers may come and go
        self.core = Coordinator(config, Prompts(), 1, time.monotonic())
        self.sockets = ServerSockets(config.transport, read_keys(self.run, "server"), read_keys(self.run, "client").public)
        publish(self.run, Address(1, self.sockets.router_endpoint, self.sockets.publisher_endpoint))
        self.origin = Origin(self.run, folder / "trainer")
        self.to_trainer: list[Message] = []
        self.nodes: list[Node] = []
        self.core.handle(TRAINER, Register(Role.trainer, "trainer", 1), time.monotonic())
        self._news = asyncio.Event()
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        receiving = asyncio.create_task(self.sockets.receive())
        while True:
            await asyncio.wait([receiving], timeout=0.1)
            now = time.monotonic()
            if receiving.done():
                peer, message = receiving.result()
                assert not isinstance(message, MessageError), message
                self.core.handle(peer, message, now)
                receiving = asyncio.create_task(self.sockets.receive())
            self.core.registry.heard(TRAINER, now)
            for worker in self.core.registry.of(Role.rollout):
                if not await self.sockets.send(worker.peer, self.alive):
                    self.core.registry.unreachable(worker.peer, now)
            self.core.tick(now)
            await self._flush()
            self._news.set()

    @property
    def alive(self) -> Message:
        from workers.messages.from_coordinator import HeartbeatReply
        return HeartbeatReply(self.core.training.announcement, known=True)

    async def _flush(self) -> None:
        outbox, self.core.outbox = self.core.outbox, []
        for peer, message in outbox:
            if peer is None:
                await self.sockets.publish(message)
            elif peer == TRAINER:
                self.to_trainer.append(message)
            else:
                await self.sockets.send(peer, message)

    def announce(self, announcement: Announcement) -> None:
        self.core.handle(TRAINER, StepFinished(announcement, {}), time.monotonic())

    def publish(self, version: Version, weights: np.ndarray) -> Announcement:
        """Publish and announce a version that the trainer has."""
        announcement = self.origin.publish(version, weights)
        self.announce(announcement)
        return announcement

    def begin(self, version: Version, weights: np.ndarray, num_chunks: int) -> tuple[Announcement, Callable[[], None]]:
        """Announce a version of which the trainer's server has so many chunks only (`begun` bytes), until the function that is returned is
        called (`to_come`)."""
        elsewhere = Origin(self.run, self.folder / f"whole-{version}")
        announcement = elsewhere.publish(version, weights)
        source = elsewhere.store.published(version)
        incoming: Incoming = self.origin.store.begin((source / MANIFEST).read_bytes(), version)
        self.origin.server.offer_incoming(incoming)
        contents = {entry.name: (source / entry.name).read_bytes() for entry in incoming.manifest.files}
        elsewhere.close()

        def give(number: int) -> int:
            """Returns the bytes that are still to come."""
            for chunk in incoming.missing()[:number]:
                incoming.write(chunk, contents[chunk.name][chunk.offset: chunk.offset + chunk.size])

            return sum(chunk.size for chunk in incoming.missing())

        self.to_come = give(num_chunks)
        self.begun = incoming.manifest.size - self.to_come
        announcement = Announcement(version, "", announcement.digest, [self.origin.server.endpoint])
        self.announce(announcement)
        return announcement, lambda: give(len(incoming.chunks)) and None

    async def start(self, name: str, *words: str, **changes: object) -> Node:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.wire.fetching_worker", str(self.run.path), name, str(self.folder / name),
            json.dumps({**self.changes, **changes}), *words, cwd=PROJECT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT)
        self.nodes.append(Node(process))
        return self.nodes[-1]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def close(self) -> None:
        try:
            for node in self.nodes:
                await node.end()
        finally:
            for node in self.nodes:
                if node.process.returncode is None:
                    await node.kill()
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
            self.sockets.close()
            self.origin.close()


@pytest.fixture
async def make_fleet(tmp_path: Path) -> AsyncIterator[Callable[..., Fleet]]:
    fleets: list[Fleet] = []

    def make(**changes: Any) -> Fleet:
        fleets.append(Fleet(tmp_path, changes))
        return fleets[-1]

    yield make
    for fleet in fleets:
        await fleet.close()


async def test_weights_go_from_node_to_node_and_a_late_joiner_catches_up(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(fanout=1)
    fleet.publish(V0, FIRST)
    first = await fleet.start("a")
    await first.holds(V0, FIRST)
    sent = fleet.origin.server.counters.bytes_sent
    second = await fleet.start("b")
    await second.holds(V0, FIRST)
    newer = step(FIRST, 2)
    fleet.publish(V1, newer)
    for node in (first, second):
        await node.holds(V1, newer)
    late = await fleet.start("c")
    await late.holds(V1, newer)
    manifest = len((fleet.origin.store.published(V1) / MANIFEST).read_bytes())
    assert fleet.origin.server.counters.bytes_sent <= sent + BYTES + 2 * manifest, "the trainer sent each version once"
    await fleet.until(lambda: all(worker.held == V1 for worker in fleet.core.registry.of(Role.rollout)))
    assert not fleet.to_trainer or not any(isinstance(message, FallbackWanted) for message in fleet.to_trainer)


async def test_a_worker_dies_in_mid_transfer_and_its_children_go_on(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(fanout=1)
    _, complete = fleet.begin(V0, FIRST, num_chunks=10)
    parent = await fleet.start("a")
    await parent.says("arrived")
    child = await fleet.start("b")
    await child.says("arrived")
    assert fleet.origin.server.counters.num_fetchers == 1, "it came from its parent"
    await parent.kill()
    complete()
    await child.holds(V0, FIRST)
    late = await fleet.start("c")
    await late.holds(V0, FIRST)
    await fleet.until(lambda: len(fleet.core.registry.of(Role.rollout)) == 2)
    assert fleet.origin.server.counters.num_fetchers == 2, "and what was lost, from the trainer; the next one again from a worker"


async def test_a_transfer_that_has_begun_is_finished_and_only_the_newest_counts_after_it(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.publish(V0, FIRST)
    node = await fleet.start("a")
    await node.holds(V0, FIRST)
    second, fourth = step(FIRST, 2), step(FIRST, 4)
    _, complete = fleet.begin(V1, second, num_chunks=10)
    await fleet.until(lambda: [worker.fetching for worker in fleet.core.registry.of(Role.rollout)] == [V1])
    await fleet.until(lambda: fleet.origin.server.counters.chunks_sent >= 60)
    await fleet.until(lambda: node.lines[-1] == f"arrived {fleet.begun}")
    fleet.publish(V2, step(FIRST, 3))
    fleet.publish(V3, fourth)
    complete()
    await node.holds(V3, fourth)
    await node.holds(V1, second)
    assert not any(line.startswith(f"held {V2}") for line in node.lines)


async def test_a_version_of_which_nothing_has_come_gives_way_to_a_newer_one(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.origin.server.expect(V0)
    fleet.announce(Announcement(V0, "", "0" * 64, [fleet.origin.server.endpoint]))
    node = await fleet.start("a")
    await fleet.until(lambda: fleet.origin.server.counters.num_fetchers == 1)
    newer = step(FIRST, 2)
    fleet.publish(V1, newer)
    await node.holds(V1, newer)
    assert not any(line.startswith(f"held {V0}") for line in node.lines)


async def test_two_updates_faster_than_one_load(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.publish(V0, FIRST)
    node = await fleet.start("a", "gated")
    await node.says(f"loading {V0}")
    fourth = step(FIRST, 4)
    for version, weights in ((V1, step(FIRST, 2)), (V2, step(FIRST, 3)), (V3, fourth)):
        fleet.publish(version, weights)
    node.load()
    node.load()
    await node.holds(V3, fourth)
    assert [line.split()[1] for line in node.lines if line.startswith("held")] == [str(V0), str(V3)]


async def test_never_do_all_workers_load_at_once(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.publish(V0, FIRST)
    nodes = [await fleet.start(name, "gated") for name in "ab"]
    for node in nodes:
        node.load()
        await node.holds(V0, FIRST)
    permits = fleet.core.delivery.permits
    await fleet.until(lambda: len(fleet.core.registry.ready()) == 2 and not permits.loading)
    newer = step(FIRST, 2)
    fleet.publish(V1, newer)
    await fleet.until(lambda: len(permits.loading) == 1 and len(permits.waiting) == 1)
    loading = [node for node in nodes if f"loading {V1}" in node.lines]
    assert len(loading) <= 1
    for node in nodes:
        node.load()
    for node in nodes:
        await node.holds(V1, newer)
    await fleet.until(lambda: not permits.loading and not permits.waiting)


async def test_without_a_permit_from_a_worker_that_died_over_it_the_others_load(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.publish(V0, FIRST)
    nodes = {name: await fleet.start(name, "gated") for name in "ab"}
    for node in nodes.values():
        node.load()
        await node.holds(V0, FIRST)
    permits = fleet.core.delivery.permits
    await fleet.until(lambda: len(fleet.core.registry.ready()) == 2 and not permits.loading)
    newer = step(FIRST, 2)
    fleet.publish(V1, newer)
    await fleet.until(lambda: len(permits.loading) == 1 and len(permits.waiting) == 1)
    hosts = {worker.host: worker.peer for worker in fleet.core.registry.of(Role.rollout)}
    [loading] = [name for name, peer in hosts.items() if peer in permits.loading]
    await nodes.pop(loading).kill()
    [other] = nodes.values()
    other.load()
    await other.holds(V1, newer)


async def test_workers_of_one_node_fetch_once(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    _, complete = fleet.begin(V0, FIRST, num_chunks=10)
    first = await fleet.start("a")
    await first.says(f"arrived {fleet.begun}")
    second = await fleet.start("a")
    await fleet.until(lambda: len(fleet.core.delivery.distribution.trees[V0].nodes["a"].endpoints) == 2)
    await first.kill()
    complete()
    await second.holds(V0, FIRST)
    workers = fleet.core.registry.of(Role.rollout)
    await fleet.until(lambda: bool(workers[-1].held))
    assert workers[-1].status.fetch_bytes == fleet.to_come, "what the first had got was still there"


async def test_weights_come_by_shared_storage_where_they_cannot_be_streamed(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(timeout_s=12.0)
    whole = Origin(fleet.run, fleet.folder / "storage")
    announced = whole.publish(V0, FIRST)
    folder = whole.store.published(V0)
    (folder / MANIFEST).rename(fleet.folder / "manifest")  # as seen by a node whose storage shows names late
    whole.server.close()
    fleet.announce(announced)
    node = await fleet.start("a")
    await fleet.until(lambda: any(isinstance(message, FallbackWanted) for message in fleet.to_trainer))
    [wanted] = [message for message in fleet.to_trainer if isinstance(message, FallbackWanted)]
    assert wanted.transport == "zmq" and announced.sources[0] in wanted.cause
    assert any("weights by zmq have failed" in notice for notice in fleet.core.delivery.notices)
    fleet.core.handle(TRAINER, Republished(Announcement(V0, str(folder), announced.digest, announced.sources)), time.monotonic())
    await fleet.until(lambda: [worker.status.waiting_for for worker in fleet.core.registry.of(Role.rollout)]
                      == [f"version {V0} to be seen in {folder}"])
    (fleet.folder / "manifest").rename(folder / MANIFEST)
    await node.holds(V0, FIRST, "disk")
    await fleet.until(lambda: [worker.status.num_fallbacks for worker in fleet.core.registry.of(Role.rollout)] == [1])
    newer, asked = step(FIRST, 2), [line for line in node.lines if "could not be had by zmq" in line]
    again = Origin(fleet.run, fleet.folder / "storage")
    announced = again.publish(V1, newer)
    again.server.close()
    fleet.announce(Announcement(V1, str(again.store.published(V1)), announced.digest, announced.sources))
    await node.holds(V1, newer, "disk")
    assert asked and [line for line in node.lines if "could not be had by zmq" in line] == asked, "it was not waited for again"
    whole.store.leave()
    again.store.leave()


async def test_a_worker_that_can_get_weights_in_no_way_says_every_cause(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(timeout_s=1.0)
    fleet.announce(Announcement(V0, str(fleet.folder / "nowhere"), "0" * 64, ["tcp://127.0.0.1:9"]))
    node = await fleet.start("a")
    async with asyncio.timeout(WAIT_S):
        assert await node.process.wait() == 1
    text = "\n".join(node.lines)
    assert f"version {V0} cannot be had: by zmq: " in text and "by disk: " in text and "nowhere" in text

"""One worker's way to weights, with the coordinator's part played by hand and the trainer's weight server real."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.wire.fetching_worker import make_config
from tests.wire.weight_nodes import Origin, make_weights, read, step
from workers.config import Config
from workers.messages.from_coordinator import LoadGranted, Sources
from workers.messages.from_worker import LoadRequest, SourcesRequest, TransportFailed
from workers.messages.parts import Announcement, Message, Version
from workers.rollout.weights.fetch import MAX_SKIPPED, WeightFetch, WeightsSuperseded
from workers.run.folder import RunFolder
from workers.weights.manifest import MANIFEST, WeightsError
from workers.weights.store import NodeStore

WAIT_S = 60.0
VERSIONS = [Version(1, number) for number in range(6)]
V0, V1, V2 = VERSIONS[:3]
NOWHERE = "tcp://127.0.0.1:9"
LONG_S = 30.0  # a heartbeat that no test waits for


class Hand:
    """A worker's fetch, and a coordinator that names no other workers; `in_touch` with it or not. `given`: a config instead of `changes`."""

    def __init__(self, run: RunFolder, folder: Path, *, beat_s: float = 0.05, answers: bool = True, given: Config | None = None,
                 **changes: object) -> None:
        config = given or make_config(str(folder / "node"), changes)
        config.transport.heartbeat_s = beat_s
        self.sent: list[Message] = []
        self.in_touch, self.leads, self._answers = True, True, answers
        self._news = asyncio.Event()
        self.fetch = WeightFetch(run, config, self._send, lambda: self.in_touch)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self._news.set()
        if isinstance(message, SourcesRequest) and self._answers:
            self.fetch.take(Sources(message.version, [], self.leads))

    def all(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.sent if isinstance(message, kind)]

    async def says(self, kind: type[Message]) -> Message:
        async with asyncio.timeout(WAIT_S):
            while not self.all(kind):
                self._news.clear()
                await self._news.wait()
        return self.all(kind)[-1]

    async def waits_for(self, words: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while words not in self.fetch.waiting_for:
                await asyncio.sleep(0.01)

    def get(self, announcement: Announcement) -> asyncio.Task[Path]:
        """Begin to fetch what has just been announced."""
        self.fetch.announced(announcement)
        return asyncio.create_task(self.fetch.fetch(announcement))


@pytest.fixture
def origin(run: RunFolder, tmp_path: Path):
    origin = Origin(run, tmp_path / "trainer")
    yield origin
    origin.close()


@pytest.fixture
async def hands() -> AsyncIterator[list[Hand]]:
    made: list[Hand] = []
    yield made
    for hand in made:
        await hand.fetch.close()


@pytest.fixture
def hand(run: RunFolder, tmp_path: Path, hands: list[Hand]) -> Hand:
    hands.append(Hand(run, tmp_path))
    return hands[-1]


@pytest.fixture
def slow_hand(run: RunFolder, tmp_path: Path, hands: list[Hand]) -> Hand:
    """With a heartbeat so long that news always come before it."""
    hands.append(Hand(run, tmp_path, beat_s=LONG_S))
    return hands[-1]


def unreachable(version: Version, folder: str = "") -> Announcement:
    return Announcement(version, folder, "0" * 64, [NOWHERE])


async def test_versions_come_and_only_two_of_them_stay(hand: Hand, origin: Origin) -> None:
    weights, folders = make_weights(1), []
    for number, version in enumerate(VERSIONS[:4]):
        weights = step(weights, number)
        folders.append(await hand.get(origin.publish(version, weights)))
        assert (read(folders[-1]) == weights).all()
        assert [folder for folder in folders if folder.exists()] == folders[-2:], "the newest, and the one that may still be loaded"
    assert hand.fetch.via == "zmq" and hand.fetch.num_fallbacks == 0 and hand.fetch.fetch_bytes >= 4 * weights.nbytes
    assert hand.fetch.waiting_for == "" and hand.all(SourcesRequest) == [SourcesRequest(version) for version in VERSIONS[:4]]


async def test_without_an_answer_of_the_coordinator_the_trainer_is_asked(run: RunFolder, tmp_path: Path, hands: list[Hand], origin: Origin) -> None:
    hands.append(Hand(run, tmp_path, answers=False, timeout_s=4.0))
    weights = make_weights(1)
    assert (read(await hands[0].get(origin.publish(V0, weights))) == weights).all()
    assert len(hands[0].all(SourcesRequest)) > 2, "asked again and again"


async def test_a_failure_that_a_newer_version_explains_is_skipped_once(slow_hand: Hand) -> None:
    hand = slow_hand
    for number, version in enumerate(VERSIONS[:2]):
        fetching = hand.get(unreachable(version))
        await hand.waits_for("another way")
        hand.fetch.announced(unreachable(VERSIONS[number + 1]))
        with pytest.raises(WeightsSuperseded):
            await fetching
        assert len(hand.all(TransportFailed)) == number, "the second time it is no chance, and said, or this would go on for ever"
    assert hand.all(TransportFailed) == [TransportFailed(V1, "zmq", hand.all(TransportFailed)[0].cause)]  # type: ignore[attr-defined]


async def test_sources_that_are_away_for_a_while_are_asked_again(hand: Hand, origin: Origin) -> None:
    weights = make_weights(1)
    announcement = origin.publish(V0, weights)
    origin.server.withdraw(V0)
    fetching = hand.get(announcement)
    await hand.waits_for("another way")
    await hand.says(SourcesRequest)
    folder = origin.store.published(V0)
    origin.server.offer(V0, folder, (folder / MANIFEST).read_bytes(), None)
    assert (read(await fetching) == weights).all() and hand.fetch.via == "zmq"
    assert not hand.all(TransportFailed), "which would have put the run on shared storage for good"


async def test_versions_that_come_in_no_way_are_not_skipped_for_ever(slow_hand: Hand, tmp_path: Path) -> None:
    hand = slow_hand
    hand.fetch._config.timeout_s = 0.2
    nowhere = str(tmp_path / "nowhere")
    for number, version in enumerate(VERSIONS[:MAX_SKIPPED]):
        fetching = hand.get(unreachable(version, nowhere))
        await hand.waits_for("another way")
        hand.fetch.announced(unreachable(VERSIONS[number + 1], nowhere))
        with pytest.raises(WeightsSuperseded if number < MAX_SKIPPED - 1 else WeightsError) as caught:
            await fetching
    for part in ("by zmq", NOWHERE, "by disk", "nowhere", "weights.dir"):
        assert part in str(caught.value)


async def test_while_the_trainer_is_gone_the_next_one_is_waited_for(run: RunFolder, tmp_path: Path, hands: list[Hand], origin: Origin) -> None:
    hands.append(Hand(run, tmp_path, timeout_s=0.2))
    [hand] = hands
    fetching = hand.get(unreachable(V0, str(tmp_path / "nowhere")))
    hand.in_touch = False
    await hand.says(TransportFailed)
    await hand.waits_for("another way")
    assert not fetching.done(), "nobody could do anything about it"
    hand.fetch._config.timeout_s = WAIT_S  # this one comes, however busy the machine is
    weights = make_weights(1)
    newer = origin.publish(Version(2, 0), weights)
    hand.fetch.announced(newer)
    with pytest.raises(WeightsSuperseded):
        await fetching
    assert (read(await hand.fetch.fetch(newer)) == weights).all()


async def test_where_memory_is_full_the_way_is_shared_storage(hand: Hand, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = make_weights(1)
    announcement = origin.publish(V0, weights)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    fetching = hand.get(announcement)
    failed = await hand.says(TransportFailed)
    assert isinstance(failed, TransportFailed) and failed.transport == "zmq" and "weights.dir" in failed.cause
    folder = origin.store.published(V0)
    hand.fetch.announced(Announcement(V0, str(folder), announcement.digest, announcement.sources))
    assert await fetching == folder and hand.fetch.via == "disk" and hand.fetch.num_fallbacks == 1
    num_said = len(hand.sent)
    later = origin.publish(V1, weights)
    folder = origin.store.published(V1)
    assert await hand.get(Announcement(V1, str(folder), later.digest, later.sources)) == folder, "once and for good: streaming is not tried again"
    assert len(hand.sent) == num_said and hand.fetch.num_fallbacks == 2


async def test_what_has_failed_once_is_not_tried_first_again(run: RunFolder, tmp_path: Path, hands: list[Hand], origin: Origin) -> None:
    """Also where nothing else was offered, and the version is overtaken before it is."""
    hands.append(Hand(run, tmp_path, timeout_s=0.2))
    [hand] = hands
    fetching = hand.get(unreachable(V0, ""))
    await hand.says(TransportFailed)
    later = origin.publish(V1, make_weights(1))
    folder = origin.store.published(V1)
    newer = Announcement(V1, str(folder), later.digest, unreachable(V0, "").sources)
    hand.fetch.announced(newer)
    with pytest.raises(WeightsSuperseded):
        await fetching
    assert await hand.fetch.fetch(newer) == folder and hand.fetch.via == "disk"


async def test_what_was_streamed_goes_once_versions_come_by_storage(hand: Hand, origin: Origin) -> None:
    """A node whose memory was full, perhaps: it keeps no version there for ever."""
    weights, streamed = make_weights(1), []
    for number, version in enumerate(VERSIONS[:4]):
        weights = step(weights, number)
        announcement = origin.publish(version, weights)
        if number < 2:
            streamed.append(await hand.get(announcement))
            continue
        by_storage = Announcement(version, str(origin.store.published(version)), announcement.digest, [NOWHERE])
        assert (read(await hand.get(by_storage)) == weights).all() and hand.fetch.via == "disk"
        assert streamed[-1].exists() == (number < 3), "what is loaded, and may be loaded, lies there for one version more"


async def test_a_version_that_another_worker_of_this_node_fetches_is_waited_for(
        run: RunFolder, tmp_path: Path, hand: Hand, origin: Origin) -> None:
    """Else a node whose fetches take longer than a step would hold, and fetch, a version more."""
    weights = make_weights(1)
    announcement, content = origin.publish(V0, weights), (origin.store.published(V0) / "manifest.json").read_bytes()
    store, source = NodeStore(run.store(str(tmp_path / "node"))), origin.store.published(V0)
    assert store.lock(V0, WAIT_S, threading.Event())
    begun = store.begin(content, V0)
    hand.leads = False
    fetching = hand.get(announcement)
    await hand.says(SourcesRequest)
    async with asyncio.timeout(WAIT_S):
        while hand.fetch.waiting_for:  # the coordinator's answer
            await asyncio.sleep(0.01)
    for chunk in begun.chunks[:-1]:
        begun.write(chunk, (source / chunk.name).read_bytes()[chunk.offset:chunk.offset + chunk.size])
    hand.fetch.announced(origin.publish(V1, weights))
    begun.write(begun.chunks[-1], (source / begun.chunks[-1].name).read_bytes()[begun.chunks[-1].offset:])
    begun.finish()
    store.unlock(V0)
    assert (read(await fetching) == weights).all() and hand.fetch.fetch_bytes == 0, "it came once"
    store.leave()


async def test_a_fetch_that_is_cancelled_ends_and_the_next_one_goes_on(hand: Hand, origin: Origin) -> None:
    weights = make_weights(1)
    announcement = origin.publish(V0, weights)
    origin.server.withdraw(V0)
    origin.server.expect(V0)
    fetching = hand.get(announcement)
    await hand.says(SourcesRequest)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    origin.publish(V1, weights)
    origin.server.offer(V0, origin.store.published(V0), (origin.store.published(V0) / "manifest.json").read_bytes())
    assert (read(await hand.get(announcement)) == weights).all()


async def test_a_permit_is_asked_for_until_it_is_given(hand: Hand) -> None:
    entered = asyncio.Event()

    async def load(version: Version) -> None:
        async with hand.fetch.permit(version):
            entered.set()

    loading = asyncio.create_task(load(V1))
    async with asyncio.timeout(WAIT_S):
        while len(hand.all(LoadRequest)) < 3:
            await asyncio.sleep(0.01)
    assert "permission to load version 1.1" in hand.fetch.waiting_for
    hand.fetch.take(LoadGranted(V0))
    await asyncio.sleep(0)
    assert not entered.is_set(), "that was for another version"
    hand.fetch.take(LoadGranted(V1))
    await loading
    assert entered.is_set() and hand.fetch.waiting_for == ""
    hand.sent.clear()
    again = asyncio.create_task(load(V1))
    await hand.says(LoadRequest)
    assert not again.done(), "one permit is for one time"
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_a_worker_does_not_wait_for_ever_for_permission(run: RunFolder, tmp_path: Path, hands: list[Hand],
                                                              capfd: pytest.CaptureFixture[str]) -> None:
    hands.append(Hand(run, tmp_path, timeout_s=0.1))
    async with hands[0].fetch.permit(V1):
        pass
    assert "loads all the same" in capfd.readouterr().out


async def test_with_shared_storage_alone_nothing_is_served(run: RunFolder, tmp_path: Path, hands: list[Hand], origin: Origin) -> None:
    hands.append(Hand(run, tmp_path, transport="disk"))
    [hand] = hands
    assert hand.fetch.endpoint == "" and not (tmp_path / "node").exists()
    announcement = origin.publish(V0, make_weights(1))
    folder = await hand.get(Announcement(V0, str(origin.store.published(V0)), announcement.digest))
    assert folder == origin.store.published(V0) and (hand.fetch.via, hand.fetch.num_fallbacks) == ("disk", 0)
    assert hand.sent == []

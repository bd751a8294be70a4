"""One coordinator goes, another one comes: peers go over to it, and what was not acknowledged reaches it exactly once."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.wire.fleet import TRANSPORT, Play, Weights, ended, generated, make_config, make_lease, make_run, playing, working
from tests.wire.workers.rollout.engines.test_engine import pid_of
from tests.wire.workers.rollout.leases.test_drain import assert_nothing_runs, until_out_of_touch
from workers.messages.codec import from_workers
from workers.messages.from_coordinator import Finish, HeartbeatReply, Suspended, Welcome
from workers.messages.from_worker import Goodbye, GroupFinished, GroupParked, Heartbeat, LoadRequest, Register
from workers.messages.parts import Announcement, HeldLease, Message, Purpose, Role, Version
from workers.run.folder import RunFolder
from workers.slurm.termination import Termination
from workers.transport import peer as peer_module
from workers.transport.client import CoordinatorLost, NoCoordinator
from workers.transport.peer import Peer

WAIT_S = 120.0
HELD = HeldLease("g5", 2, Purpose.training, Version(1, 3))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return Weights(tmp_path_factory.mktemp("weights"))


@dataclass
class Standing:
    """A peer that serves, and what it has told."""

    peer: Peer
    serving: asyncio.Task[str]
    messages: list[Message] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)


@asynccontextmanager
async def standing(run: RunFolder, *, follows: bool = True, silence_s: float = WAIT_S) -> AsyncIterator[Standing]:
    messages: list[Message] = []
    versions: list[Version] = []
    peer = Peer(run, TRANSPORT, Role.rollout, silence_s, heartbeat=lambda: Heartbeat(capacity=7), on_message=messages.append,
                on_announcement=lambda announcement: versions.append(announcement.version), leases=lambda: [HELD], job="12_3", follows=follows)
    async with peer:
        serving = asyncio.create_task(peer.serve())
        try:
            yield Standing(peer, serving, messages, versions)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def announcement(epoch: int, step: int) -> Announcement:
    return Announcement(Version(epoch, step), "/weights", "digest")


async def taken_over(play: Play, who: Standing) -> None:
    """`play` knows the peer as one that brings its leases."""
    await play.until(lambda: play.all(Heartbeat))
    (register,) = play.all(Register)
    assert (register.role, register.pid, register.job, register.leases) == (Role.rollout, os.getpid(), "12_3", [HELD])
    assert play.received[0] == register and play.all(Heartbeat)[0].capacity == 7
    async with asyncio.timeout(WAIT_S):
        while not (who.peer._welcomed.is_set() and who.peer._address and who.peer._address.epoch == play.epoch):
            await asyncio.sleep(0.01)
    assert who.peer.in_touch


async def test_the_same_version_is_handed_on_again_when_it_can_be_had_in_more_ways(run: RunFolder) -> None:
    less = Announcement(Version(1, 4), "", "digest", ["tcp://127.0.0.2:1"])
    more = Announcement(Version(1, 4), "/weights", "digest", ["tcp://127.0.0.2:1"])
    heard: list[Announcement] = []
    peer = Peer(run, TRANSPORT, Role.rollout, WAIT_S, heartbeat=Heartbeat, on_message=lambda _: None, on_announcement=heard.append,
                serves="tcp://127.0.0.3:1")
    async with playing(run, 1, less) as play, peer:
        serving = asyncio.create_task(peer.serve())
        await play.until(lambda: len(play.all(Heartbeat)) > 1)
        await play.say(HeartbeatReply(more, known=True))
        await play.say(HeartbeatReply(less, known=True))  # was on its way for longer
        await play.say(HeartbeatReply(Announcement(Version(1, 5), "", "next"), known=True))
        async with asyncio.timeout(WAIT_S):
            while len(heard) < 3:
                await asyncio.sleep(0.01)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        assert [register.serves for register in play.all(Register)] == ["tcp://127.0.0.3:1"]
    assert heard == [less, more, Announcement(Version(1, 5), "", "next")]


async def test_a_process_that_was_suspended_itself_does_not_count_that_as_silence(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pause_s = 0.0
    monkeypatch.setattr(peer_module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + pause_s))
    async with playing(run, 1, announcement(1, 4)) as play, standing(run, follows=False, silence_s=WAIT_S) as who:
        await taken_over(play, who)
        num_beats = len(play.all(Heartbeat))
        pause_s = 10 * WAIT_S  # what the clock shows to one that SIGSTOP or SLURM has kept from running
        await play.until(lambda: len(play.all(Heartbeat)) > num_beats + 3 or who.serving.done())
        assert not who.serving.done()


async def test_a_suspended_peer_goes_over_to_the_next_coordinator(run: RunFolder) -> None:
    async with playing(run, 1, announcement(1, 4)) as first, standing(run) as who:
        await taken_over(first, who)
        await first.say(Suspended("its time is over"))
        await until_out_of_touch(who.peer)
        num_beats = len(first.all(Heartbeat))
        async with playing(run, 2, announcement(2, 3)) as second:
            await taken_over(second, who)
            assert second.peer == first.peer, "the routing id is the same"
            assert len(first.all(Heartbeat)) <= num_beats + 1, "a suspended coordinator gets no heartbeats"
            await who.peer.send(Goodbye("to the second"))
            await second.until(lambda: second.all(Goodbye))
            assert first.all(Goodbye) == []
            await second.say(Finish(""))
            assert await asyncio.wait_for(who.serving, WAIT_S) == ""
    assert [type(message) for message in who.messages] == [Welcome, Suspended, Welcome]
    assert who.versions == [Version(1, 4), Version(2, 3)], "a new epoch is newer, whatever its step"


async def test_a_dead_coordinator_is_replaced(run: RunFolder) -> None:
    async with standing_with_first(run) as (first, who):
        await first.close()
        async with playing(run, 2) as second:
            await taken_over(second, who)
            async with playing(run, 3) as third:  # the second one dies, too
                await second.say(Suspended("again"))
                await taken_over(third, who)


@asynccontextmanager
async def standing_with_first(run: RunFolder) -> AsyncIterator[tuple[Play, Standing]]:
    first = Play(run, 1)
    async with standing(run) as who:
        await taken_over(first, who)
        yield first, who


async def test_a_coordinator_that_still_talks_does_not_keep_its_workers(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "LOOK_S", 0.3)
    async with playing(run, 1) as fenced_off, standing(run) as who:
        await taken_over(fenced_off, who)
        async with playing(run, 2) as second:
            await taken_over(second, who)
            num_messages = len(fenced_off.received)
            await second.until(lambda: len(second.all(Heartbeat)) > 5)
            assert len(fenced_off.received) == num_messages


async def test_one_that_does_not_follow_stays(run: RunFolder) -> None:
    async with playing(run, 1) as first, standing(run, follows=False, silence_s=1.5) as who:
        await taken_over(first, who)
        async with playing(run, 2) as second:
            await first.say(Suspended("which means nothing here"))
            num_beats = len(first.all(Heartbeat))
            await first.until(lambda: len(first.all(Heartbeat)) > num_beats + 3)
            await first.close()
            with pytest.raises(NoCoordinator, match="silent for"):
                await asyncio.wait_for(who.serving, WAIT_S)
            assert second.received == []
    assert issubclass(NoCoordinator, CoordinatorLost)


@pytest.mark.parametrize(("ends", "cause"), [("outcome", "power cut"), ("stop", "stopped: enough")])
async def test_the_run_may_end_while_there_is_no_coordinator(run: RunFolder, ends: str, cause: str) -> None:
    async with playing(run, 1) as first, standing(run) as who:
        await taken_over(first, who)
        await first.say(Suspended("its time is over"))
        if ends == "outcome":
            run.end("power cut", "test")
        else:
            run.request_stop("enough")
        assert await asyncio.wait_for(who.serving, WAIT_S) == cause


async def test_a_stop_is_the_coordinators_business_while_there_is_one(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_module, "LOOK_S", 0.2)
    async with playing(run, 1) as first, standing(run) as who:
        await taken_over(first, who)
        run.request_stop("enough")
        num_beats = len(first.all(Heartbeat))
        await first.until(lambda: len(first.all(Heartbeat)) > num_beats + 6)
        assert not who.serving.done()


# -- whole workers -------------------------------------------------------------------------------------------------------

async def test_results_go_to_the_next_coordinator_and_are_accepted_once(run: RunFolder, weights: Weights) -> None:
    config = make_config(weights.models[0], max_new_tokens=100, tokens_per_s=200.0)
    async with playing(run, 1, weights.publish(Version(1, 0))) as first, working(run, config) as (worker, task):
        await first.until_ready()
        first.deaf = True  # its acknowledgement of g1 is lost
        await first.lease(make_lease("g1"))
        await first.until(lambda: first.all(GroupFinished))
        await first.lease(make_lease("g2"), make_lease("g3"))
        await first.until(lambda: len(first.all(Heartbeat)[-1].leases) == 3)
        await first.say(Suspended("its time is over"))
        await until_out_of_touch(worker)
        assert worker._holdings is not None
        async with asyncio.timeout(WAIT_S):
            while len(worker._holdings.results) < 3:  # finished while nobody is there
                await asyncio.sleep(0.01)
        assert len(first.all(GroupFinished)) == 1
        async with playing(run, 2, weights.publish(Version(2, 0))) as second:
            await second.until(lambda: second.all(Register))
            assert sorted(lease.group_id for lease in second.all(Register)[0].leases) == ["g1", "g2", "g3"]
            await second.until(lambda: len(second.accepted) == 3)
            ready = await second.until_ready()
            assert ready.held == Version(2, 0)
            await second.lease(make_lease("g4", version=Version(2, 0)))
            await second.until(lambda: len(second.accepted) == 4)
            await second.until(lambda: not second.all(Heartbeat)[-1].leases)
            sent = [message.group.group_id for message in second.all(GroupFinished)]
            assert sorted(sent) == ["g1", "g2", "g3", "g4"], "each is sent once, for each is acknowledged"
            (again,) = [message for message in second.all(GroupFinished) if message.group.group_id == "g1"]
            assert again.group.tokens.tolist() == first.all(GroupFinished)[0].group.tokens.tolist()
            await second.say(Finish(""))
            assert await ended(task) == Termination("finished", "")
    assert list(run.partials.iterdir()) == []


async def test_what_runs_goes_on_across_a_change_of_coordinators(run: RunFolder, weights: Weights) -> None:
    config = make_config(weights.models[0], tokens_per_s=400)
    async with playing(run, 1, weights.publish(Version(1, 1))) as first, working(run, config) as (worker, task):
        await first.until_ready()
        await first.lease(make_lease("g1"))
        await generated(worker, 100)
        assert worker._engines is not None
        server = psutil.Process(pid_of(worker._engines.engines[0]))
        server.suspend()  # until the new weights are there: it is in the middle of the samples then
        await first.say(Suspended("its time is over"))
        async with playing(run, 2, weights.publish(Version(2, 1))) as second:
            await second.until(lambda: second.all(LoadRequest))
            server.resume()
            await second.until(lambda: second.all(GroupFinished))
            group = second.all(GroupFinished)[0].group
            assert group.lengths.tolist() == [600] * 3 and {1, 2} == set(group.epochs.tolist())
            await second.say(Finish(""))
            await ended(task)


async def test_a_worker_without_a_coordinator_writes_down_what_it_holds_and_leaves(run: RunFolder, weights: Weights) -> None:
    config = make_config(weights.models[0], idle_s=2.0, tokens_per_s=30.0)
    async with playing(run, 1, weights.publish(Version(1, 2))) as first, working(run, config) as (worker, task):
        await first.until_ready()
        await first.lease(make_lease("g1"))
        await generated(worker, 10)
        await first.close()
        ending = await ended(task)
        assert ending.how == "idle" and "silent" in ending.cause
    (path,) = run.partials.iterdir()
    parked = from_workers(1 << 20).unpack(path.read_bytes())
    assert path.name == "g1.0.msgpack" and isinstance(parked, GroupParked) and parked.partial.tokens.size >= 9
    assert_nothing_runs()


async def test_a_worker_that_never_finds_a_coordinator_is_idle_on_slurm_and_fails_on_one_machine(
        run: RunFolder, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    async with working(run, make_config(weights.models[0], idle_s=0.3)) as (_, task):
        ending = await ended(task)
    assert ending.how == "idle" and "no coordinator has appeared" in ending.cause
    monkeypatch.setattr("workers.rollout.worker.START_TIMEOUT_S", 0.3)
    async with working(run, make_config(weights.models[0], local=True)) as (_, task):
        with pytest.raises(NoCoordinator):
            await ended(task)


async def test_a_run_that_is_over_or_stopped_ends_a_worker_that_waits(run: RunFolder, weights: Weights) -> None:
    async with working(run, make_config(weights.models[0])) as (_, task):
        run.request_stop("by the test")
        assert await ended(task) == Termination("finished", "stopped: by the test")
    run.end("", "test")
    async with working(run, make_config(weights.models[0])) as (_, task):
        assert await ended(task) == Termination("finished", "")


async def test_a_run_that_is_stopped_without_a_coordinator_keeps_what_was_generated(run: RunFolder, weights: Weights) -> None:
    async with playing(run, 1, weights.publish(Version(1, 3))) as first, working(run, make_config(weights.models[0])) as (worker, task):
        await first.until_ready()
        await first.lease(make_lease("g1"))
        await generated(worker, 50)
        await first.say(Suspended("its time is over"))
        run.request_stop("for now", drain=True)
        assert await ended(task) == Termination("finished", "stopped: for now")
    assert [path.name for path in run.partials.iterdir()] == ["g1.0.msgpack"]


async def test_a_run_folder_that_does_not_answer_is_no_silence_of_the_coordinator(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator writes there, too, and stands still as well."""
    thawed, asked = threading.Event(), threading.Event()

    def frozen(path: Path) -> None:
        asked.set()
        thawed.wait(WAIT_S)

    monkeypatch.setattr(peer_module, "os", SimpleNamespace(utime=frozen, getpid=os.getpid))
    async with playing(run, 1) as first, standing(run, follows=False, silence_s=1.0) as who:
        await taken_over(first, who)
        await first.close()
        await asyncio.to_thread(asked.wait, WAIT_S)
        await asyncio.sleep(2 * TRANSPORT.heartbeat_s)  # so long it stands still
        assert not who.serving.done()
        thawed.set()
        with pytest.raises(NoCoordinator, match="silent for"):  # when the folder answers at once, and the coordinator still says nothing
            await asyncio.wait_for(who.serving, WAIT_S)

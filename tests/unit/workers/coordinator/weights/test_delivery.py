"""New weights as the coordinator sees them: sources, permits, failed transports, versions that can be had in more ways."""

from __future__ import annotations

import pytest

from tests.support.ticking import pass_time
from tests.unit.workers.coordinator.test_core import ROLLOUT, TRAINER, Play, only
from workers.coordinator.monitoring.reporting import status
from workers.messages.from_coordinator import FallbackWanted, HeartbeatReply, LoadGranted, Refused, Sources, VersionAnnounced
from workers.messages.from_worker import Goodbye, Heartbeat, LoadRequest, Register, Republished, SourcesRequest, TransportFailed
from workers.messages.parts import Announcement, Message, Role, Version, WorkerStatus

V0, V1 = Version(7, 0), Version(7, 1)


def fleet(number: int, **changes) -> Play:
    """Workers w0, w1, ... on a node each, that hold version 0, of which w0 to w(number - 1) have asked."""
    play = Play(weights__fanout=1, **changes)
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(0)
    for worker in range(number):
        play.tell(name(worker), Register(Role.rollout, f"node{worker}", 1, serves=f"tcp://{worker}"))
        play.tell(name(worker), SourcesRequest(V0))
        play.tell(name(worker), Heartbeat(held=V0))
    return play


def name(worker: int) -> bytes:
    return b"w%d" % worker


def sources(play: Play, worker: int, version: Version = V1, failed: list[str] | None = None) -> list[str]:
    [answer] = only(play.tell(name(worker), SourcesRequest(version, failed or [])), Sources)
    assert answer.version == version
    return answer.endpoints


def whom(play: Play, peer: bytes, message: Message, kind: type[Message]) -> list[bytes | None]:
    """To whom messages of a kind go in answer to one."""
    play.now += 0.1
    play.core.handle(peer, message, play.now)
    outbox, play.core.outbox = play.core.outbox, []
    return [receiver for receiver, answer in outbox if isinstance(answer, kind)]


def test_workers_are_told_whom_to_fetch_from() -> None:
    play = fleet(3)
    play.publish(1)
    assert sources(play, 0) == [] and sources(play, 1) == ["tcp://0"] and sources(play, 2) == ["tcp://1", "tcp://0"]
    assert sources(play, 1) == ["tcp://0"], "asked again, it is the same"
    assert sources(play, 2, failed=["tcp://1"]) == ["tcp://0"]
    assert any("rollout 2" in notice and "tcp://1" in notice for notice in play.core.delivery.notices)
    play.tell(name(0), Goodbye("time limit"))
    assert sources(play, 1) == []


def test_a_late_joiner_is_sent_to_one_who_says_that_it_has_all() -> None:
    play = fleet(2)
    play.publish(1)
    sources(play, 0)
    play.tell(name(0), LoadRequest(V1))
    assert sources(play, 1) == ["tcp://0"]
    play.tell(name(1), Heartbeat(held=V1))
    play.tell(b"w9", Register(Role.rollout, "node9", 1, serves="tcp://9"))
    assert sources(play, 9) == ["tcp://0"]


def test_of_a_version_from_before_this_incarnation_only_the_trainer_knows() -> None:
    assert sources(fleet(1), 0, Version(6, 12)) == []


def test_permits_are_given_one_after_the_other_and_end_with_the_heartbeat() -> None:
    play = fleet(3)
    play.publish(1)
    assert whom(play, name(2), LoadRequest(V1), LoadGranted) == [name(2)]
    assert whom(play, name(0), LoadRequest(V1), LoadGranted) == [] == whom(play, name(1), LoadRequest(V1), LoadGranted)
    shown = status(play.core, play.now, 1.0, 1.0, 0, 0)["weights"]
    assert (shown["loading"], shown["waiting_to_load"]) == (["rollout 2"], ["rollout 0", "rollout 1"])
    assert whom(play, name(2), LoadRequest(V1), LoadGranted) == [name(2)], "an answer that was lost comes again"
    assert whom(play, name(2), Heartbeat(held=V0), LoadGranted) == []
    assert whom(play, name(2), Heartbeat(held=V1), LoadGranted) == [name(0)]
    assert whom(play, name(0), Goodbye("preempted"), LoadGranted) == [name(1)], "or with its worker"


def test_a_permit_ends_after_a_while_and_that_is_said() -> None:
    play = fleet(2, weights__timeout_s=5.0)
    play.publish(1)
    assert whom(play, name(0), LoadRequest(V1), LoadGranted) == [name(0)]
    assert whom(play, name(1), LoadRequest(V1), LoadGranted) == []
    pass_time(play.core, play.now + 5.5)
    assert [peer for peer, message in play.core.outbox if isinstance(message, LoadGranted)] == [name(1)]
    [notice] = play.core.delivery.notices
    assert "rollout 0" in notice and "weights.timeout_s" in notice


def test_without_rolling_nobody_waits() -> None:
    play = fleet(3, weights__rolling=False)
    play.publish(1)
    assert [whom(play, name(worker), LoadRequest(V1), LoadGranted) for worker in range(3)] == [[name(worker)] for worker in range(3)]


def test_permits_are_given_while_the_run_pauses_too() -> None:
    play = fleet(1)
    play.core.drain("time limit", play.now)
    assert whom(play, name(0), LoadRequest(V0), LoadGranted) == [name(0)], "a worker that waits for one would not come to hand anything over"


def test_a_failed_transport_is_passed_on_once_and_shown() -> None:
    play = fleet(2)
    failed = TransportFailed(V0, "zmq", "the connection broke")
    assert whom(play, name(0), failed, FallbackWanted) == [TRAINER]
    assert whom(play, name(1), failed, FallbackWanted) == [] == whom(play, name(0), failed, FallbackWanted)
    [notice] = play.core.delivery.notices
    assert "zmq" in notice and "rollout 0 on node0: the connection broke" in notice
    assert status(play.core, play.now, 1.0, 1.0, 0, 0)["weights"]["failed"] == {"zmq": "rollout 0 on node0: the connection broke"}
    [again] = only(play.tell(TRAINER, Register(Role.trainer, "node", 2)), FallbackWanted)
    assert again.transport == "zmq", "a trainer whose connection had broken hears of it"


def test_behind_the_last_transport_there_is_none_to_ask_for() -> None:
    play = fleet(1)
    assert whom(play, name(0), TransportFailed(V0, "disk", "stale"), FallbackWanted) == []
    assert "disk" in play.core.delivery.fallbacks


def test_what_can_be_had_in_more_ways_is_announced_again() -> None:
    play = fleet(1)
    more = Announcement(V0, "/weights", "digest", ["tcp://trainer"])
    assert only(play.tell(TRAINER, Republished(more)), VersionAnnounced) == [VersionAnnounced(more)]
    assert only(play.tell(name(0), Heartbeat(held=V0)), HeartbeatReply)[0].announcement == more
    assert play.tell(TRAINER, Republished(more)) == [], "once"
    play.publish(1)
    assert play.tell(TRAINER, Republished(more)) == [], "a newer version is there meanwhile"
    assert play.core.training.announcement is not None and play.core.training.announcement.version == V1


@pytest.mark.parametrize("announcement", [Announcement(V0, "/more", "another"), Announcement(V1, "/more", "digest")])
def test_only_what_was_announced_can_be_announced_again(announcement: Announcement) -> None:
    play = fleet(1)
    assert only(play.tell(TRAINER, Republished(announcement)), Refused)


@pytest.mark.parametrize("message", [SourcesRequest(V0), LoadRequest(V0), TransportFailed(V0, "zmq", "why")])
def test_only_rollout_workers_fetch(message: Message) -> None:
    play = fleet(1)
    assert only(play.tell(TRAINER, message), Refused)


def test_only_the_trainer_publishes() -> None:
    assert only(fleet(1).tell(name(0), Republished(Announcement(V0, "/evil", "digest", ["tcp://evil"]))), Refused)


def test_what_an_update_costs_is_shown() -> None:
    play = fleet(2)
    for worker in range(2):
        play.tell(name(worker), Heartbeat(held=V0, status=WorkerStatus(
            num_updates=2, fetch_s=3.0, fetch_bytes=500, pause_s=0.5, load_s=1.0, num_fallbacks=1, num_refetched=worker, weights_via="zmq")))
    shown = status(play.core, play.now, 1.0, 1.0, 0, 0)
    assert {key: shown["weights"][key] for key in ("fetch_s", "fetch_bytes", "pause_s", "load_s", "num_fallbacks", "num_refetched")} == {
        "fetch_s": 1.5, "fetch_bytes": 250.0, "pause_s": 0.25, "load_s": 0.5, "num_fallbacks": 2, "num_refetched": 1}
    assert [worker["via"] for worker in shown["workers"] if worker["name"].startswith("rollout")] == ["zmq", "zmq"]
    assert ROLLOUT not in play.core.registry.workers

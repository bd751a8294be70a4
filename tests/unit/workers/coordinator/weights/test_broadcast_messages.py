"""Broadcasts of weights as the whole coordinator sees them: which of its workers are in the group, and what ends it."""

from __future__ import annotations

import pytest

from tests.support.ticking import pass_time
from tests.unit.workers.coordinator.test_core import TRAINER, Play, only
from workers.coordinator.monitoring.reporting import status
from workers.coordinator.weights.broadcast_group import JOIN_S
from workers.messages.broadcasts import (
    Broadcast,
    BroadcastReady,
    BroadcastRefused,
    BroadcastWanted,
    Bucket,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    OpenUpdateGroup,
    Piece,
    PrepareBroadcast,
    UpdateGroupBroken,
    UpdateGroupJoined,
    UpdateGroupOpened,
)
from workers.messages.from_coordinator import Refused
from workers.messages.from_worker import Draining, Goodbye, Heartbeat, Register
from workers.messages.parts import Role, Version

GROUP = "weights-7-1"
OPENED = UpdateGroupOpened(GROUP, "10.0.0.1", 4711, "gloo", [Bucket(0, [Piece("weight", [0], [1])])])


def fleet(*ranks: int) -> tuple[Play, list]:
    """Workers w0, w1, ... that hold version 0 and would bring so many ranks; and what is said as they load it."""
    play = Play()
    play.tell(TRAINER, Register(Role.trainer, "node", 2))
    play.publish(0)
    for number in range(len(ranks)):
        play.tell(b"w%d" % number, Register(Role.rollout, f"node{number}", 1))
    for number in range(len(ranks)):
        play.tell(b"w%d" % number, Heartbeat())
    told: list = []
    for number, own in enumerate(ranks):
        told += play.tell(b"w%d" % number, Heartbeat(held=Version(7, 0), update_ranks=own))
        pass_time(play.core, play.now)
        told += play.sent()
        assert number == len(ranks) - 1 or not only(told, OpenUpdateGroup), "those that have not loaded it yet are waited for"
    return play, told


def standing(*ranks: int) -> Play:
    play, _ = fleet(*ranks)
    assert len(only(play.tell(TRAINER, OPENED), JoinUpdateGroup)) == sum(own > 0 for own in ranks)
    for peer in (TRAINER, *(b"w%d" % number for number, own in enumerate(ranks) if own)):
        play.tell(peer, UpdateGroupJoined(GROUP))
    assert status(play.core, play.now, 0.0, 0.0, 0, 0)["weights"]["broadcast_to"] == sum(own > 0 for own in ranks)
    return play


def test_workers_that_can_be_in_a_group_are_once_they_hold_the_version() -> None:
    assert only(fleet(2, 0, 1)[1], OpenUpdateGroup) == [OpenUpdateGroup(GROUP, 4)]
    assert only(fleet(0, 0)[1], OpenUpdateGroup) == [], "with weights.transport=zmq nobody brings ranks"


def test_a_broadcast_from_the_trainers_wish_to_its_beginning() -> None:
    play = standing(2, 1)
    assert only(play.tell(TRAINER, BroadcastWanted(Version(7, 1))), PrepareBroadcast) == [PrepareBroadcast(GROUP, Version(7, 1))] * 2
    assert not only(play.tell(b"w0", BroadcastReady(GROUP, Version(7, 1))), Broadcast)
    assert only(play.tell(b"w1", BroadcastReady(GROUP, Version(7, 1))), Broadcast) == [Broadcast(GROUP, Version(7, 1))] * 3
    play.tell(b"w0", Heartbeat(held=Version(7, 1), update_ranks=2))  # before it has been announced
    play.publish(1)
    assert status(play.core, play.now, 0.0, 0.0, 0, 0)["weights"]["broadcast_to"] == 2


@pytest.mark.parametrize("end", [Goodbye("time limit"), Draining("time limit"), UpdateGroupBroken(GROUP, "its engine has died")])
def test_a_member_that_leaves_ends_the_group(end: Goodbye | Draining | UpdateGroupBroken) -> None:
    play = standing(1, 1)
    told = only(play.tell(b"w1", end), LeaveUpdateGroup)
    refused = only(play.tell(TRAINER, BroadcastWanted(Version(7, 1))), BroadcastRefused)
    assert len(refused) == 1 and (told or isinstance(end, Draining))
    assert status(play.core, play.now, 0.0, 0.0, 0, 0)["weights"]["broadcast_to"] == 0
    assert any(GROUP in notice for notice in play.core.take_notices())


def test_a_group_that_is_not_made_in_time_is_given_up() -> None:
    play, _ = fleet(1)
    play.tell(TRAINER, OPENED)
    play.now += JOIN_S
    play.tell(b"w0", Heartbeat(held=Version(7, 0), update_ranks=1))
    play.tell(TRAINER, Heartbeat())
    play.now += 1
    pass_time(play.core, play.now)
    outbox, play.core.outbox = play.core.outbox, []
    assert sorted(peer or b"" for peer, message in outbox if isinstance(message, LeaveUpdateGroup)) == [TRAINER, b"w0"]


def test_only_the_trainer_may_host_and_ask() -> None:
    play = standing(1)
    for message in (OPENED, BroadcastWanted(Version(7, 1))):
        assert only(play.tell(b"w0", message), Refused)

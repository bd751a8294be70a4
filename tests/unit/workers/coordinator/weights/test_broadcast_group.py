"""Who is in the group through which weights are broadcast, and when a broadcast may begin: single cases, and whatever may happen in any order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.coordinator.weights.broadcast_group import JOIN_S, PREPARE_S, SETTLE_S, Phase, UpdateGroup
from workers.messages.broadcasts import (
    Broadcast,
    BroadcastReady,
    BroadcastRefused,
    Bucket,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    OpenUpdateGroup,
    Piece,
    PrepareBroadcast,
    UpdateGroupOpened,
)
from workers.messages.parts import Message, Version

TRAINER, A, B, C = b"trainer", b"a", b"b", b"c"
BUCKETS = [Bucket(0, [Piece("one", [0], [2]), Piece("two", [0], [1])]), Bucket(1, [Piece("three", [0, 0], [1, 2])])]
NAMES = {peer: peer.decode() for peer in (TRAINER, A, B, C)}


def opened(group: UpdateGroup) -> UpdateGroupOpened:
    return UpdateGroupOpened(group.group, "10.0.0.1", 4711, "gloo", BUCKETS)


def announce(group: UpdateGroup, fleet: dict[bytes, int], now: float = 0.0) -> list[tuple[bytes | None, Message]]:
    """Announce a version, which the fleet loads; what is sent."""
    group.announced(now)
    return group.consider(TRAINER, fleet, True, now)


def stand(group: UpdateGroup, fleet: dict[bytes, int]) -> None:
    """Have a group of `fleet` made."""
    assert announce(group, fleet)[-1] == (TRAINER, OpenUpdateGroup(group.group, 1 + sum(fleet.values())))
    group.opened(opened(group))
    for peer in (TRAINER, *fleet):
        assert group.phase is Phase.joining
        group.joined(peer, group.group)
    assert group.phase is Phase.standing


def broadcast(group: UpdateGroup, fleet: dict[bytes, int], version: Version) -> list[tuple[bytes | None, Message]]:
    """A broadcast to all; what is sent at last."""
    assert group.wanted(TRAINER, version, fleet, 0.0) == [(peer, PrepareBroadcast(group.group, version)) for peer in fleet]
    *_, sent = [group.ready(peer, BroadcastReady(group.group, version)) for peer in fleet]
    return sent


def test_everyone_joins_with_ranks_of_its_own_and_a_broadcast_begins_when_all_stand_still() -> None:
    group, fleet = UpdateGroup(3), {A: 2, B: 1}
    assert announce(group, fleet) == [(TRAINER, OpenUpdateGroup("weights-3-1", 4))]
    joins = [JoinUpdateGroup("weights-3-1", "10.0.0.1", 4711, "gloo", BUCKETS, first, 4) for first in (1, 3)]
    assert group.opened(opened(group)) == [(A, joins[0]), (B, joins[1])]
    for peer in (A, TRAINER, B):
        assert group.phase is Phase.joining
        group.joined(peer, group.group)
    version = Version(3, 8)
    assert group.wanted(TRAINER, version, fleet, 0.0) == [(peer, PrepareBroadcast(group.group, version)) for peer in (A, B)]
    assert group.ready(B, BroadcastReady(group.group, version)) == []
    assert group.ready(A, BroadcastReady(group.group, version)) == [(peer, Broadcast(group.group, version)) for peer in (TRAINER, A, B)]
    assert len(broadcast(group, fleet, Version(3, 9))) == 3, "and again"


def test_without_a_group_the_trainer_is_refused_at_once() -> None:
    group = UpdateGroup(1)
    [(peer, refused)] = group.wanted(TRAINER, Version(1, 1), {A: 1}, 0.0)
    assert peer == TRAINER and isinstance(refused, BroadcastRefused)
    announce(group, {A: 1})
    [(_, refused)] = group.wanted(TRAINER, Version(1, 2), {A: 1}, 0.0)
    assert isinstance(refused, BroadcastRefused) and "being made" in refused.cause
    assert announce(group, {A: 1, B: 1}) == [], "it is let come to its end"


def test_a_fleet_that_has_changed_gets_another_group_after_the_next_version() -> None:
    group = UpdateGroup(1)
    assert announce(group, {}) == []
    stand(group, {A: 1})
    assert announce(group, {A: 1}) == []
    assert len(broadcast(group, {A: 1}, Version(1, 2))) == 2, "whoever has come in the meantime is not waited for"
    sent = announce(group, {A: 1, B: 1})
    assert [(peer, type(message)) for peer, message in sent] == [
        (TRAINER, LeaveUpdateGroup), (A, LeaveUpdateGroup), (TRAINER, OpenUpdateGroup)]
    assert group.group == "weights-1-2"


def test_nobody_is_taken_in_while_a_version_is_broadcast() -> None:
    group = UpdateGroup(1)
    stand(group, {A: 1})
    group.announced(0.0)
    assert group.consider(TRAINER, {A: 1, B: 1}, False, 1.0) == [], "B still loads the version before"
    assert len(broadcast(group, {A: 1}, Version(1, 2))) == 2
    assert group.consider(TRAINER, {A: 1, B: 1}, True, SETTLE_S + 1) == [] and group.phase is Phase.standing
    assert announce(group, {A: 1, B: 1}, SETTLE_S + 2)[-1][0] == TRAINER, "once it is announced, there is another group"


def test_workers_that_load_a_version_are_waited_for_but_not_for_ever() -> None:
    group = UpdateGroup(1)
    assert group.consider(TRAINER, {A: 1}, True, 0.0) == [], "nothing has been announced"
    group.announced(0.0)
    assert group.consider(TRAINER, {A: 1}, False, 1.0) == []
    group.announced(SETTLE_S - 1)
    assert group.consider(TRAINER, {A: 1}, False, SETTLE_S) == [(TRAINER, OpenUpdateGroup("weights-1-1", 2))]


def test_the_loss_of_a_member_ends_the_group_and_a_broadcast_that_is_prepared() -> None:
    group = UpdateGroup(1)
    stand(group, {A: 1, B: 1})
    group.wanted(TRAINER, Version(1, 2), {A: 1, B: 1}, 0.0)
    sent = group.lost(B, "rollout 1")
    assert [message for peer, message in sent if peer == TRAINER] == [
        BroadcastRefused(Version(1, 2), "rollout 1 was lost"), LeaveUpdateGroup("weights-1-1", "rollout 1 was lost")]
    assert {peer for peer, message in sent if isinstance(message, LeaveUpdateGroup)} == {TRAINER, A, B}
    assert group.lost(B, "rollout 1") == [] and group.lost(C, "rollout 2") == []
    assert "rollout 1 was lost" in group.notices[-1]
    stand(group, {A: 1})


def test_a_worker_that_does_not_generate_any_more_ends_the_group() -> None:
    group = UpdateGroup(1)
    stand(group, {A: 1, B: 2})
    for fleet in ({A: 1}, {A: 1, B: 1}):
        sent = group.wanted(TRAINER, Version(1, 2), fleet, 0.0)
        assert (TRAINER, BroadcastRefused(Version(1, 2), "members of the group have stopped generating")) == sent[0]
        assert group.phase is Phase.none
        stand(group, {A: 1, B: 2})


def test_who_does_not_join_in_time_is_left_out_ever_longer() -> None:
    group, fleet = UpdateGroup(1), {A: 1, B: 1}
    for absent in (1, 3, 7):
        announce(group, fleet)
        group.opened(opened(group))
        group.joined(TRAINER, group.group)
        group.joined(A, group.group)
        assert group.expire(NAMES, JOIN_S) == [] and group.expire(NAMES, JOIN_S + 1)
        assert group.cause == f"b: not in the group after {JOIN_S:g} s"
        stand(group, {A: 1})
        for _ in range(absent - 1):
            assert announce(group, {A: 1}) == []
    assert announce(group, fleet), "it is tried again"


def test_where_nobody_is_in_all_are_left_out_from_the_second_time_on() -> None:
    group, fleet = UpdateGroup(1), {A: 1, B: 1}
    for by_trainer in (True, False):
        assert announce(group, fleet)
        group.opened(opened(group))
        sent = group.broken(TRAINER, "the trainer", group.group, "nobody came") if by_trainer else group.expire(NAMES, JOIN_S + 1)
        assert {peer for peer, message in sent if isinstance(message, LeaveUpdateGroup)} == {TRAINER, A, B}
    assert announce(group, fleet) == [] and announce(group, fleet)


def test_a_trainer_that_cannot_host_is_not_asked_for_the_next_version() -> None:
    group = UpdateGroup(1)
    announce(group, {A: 1})
    assert group.broken(TRAINER, "the trainer", group.group, "no address")
    assert announce(group, {A: 1}) == [] and announce(group, {A: 1})


def test_who_does_not_stand_still_in_time_is_left_out() -> None:
    group, fleet = UpdateGroup(1), {A: 1, B: 1}
    stand(group, fleet)
    group.wanted(TRAINER, Version(1, 2), fleet, 5.0)
    group.ready(A, BroadcastReady(group.group, Version(1, 2)))
    sent = group.expire(NAMES, 5.0 + PREPARE_S + 1)
    assert (TRAINER, BroadcastRefused(Version(1, 2), f"b: servers were not interrupted in {PREPARE_S:g} s")) in sent
    assert group.ready(B, BroadcastReady("weights-1-1", Version(1, 2))) == [(B, BroadcastRefused(Version(1, 2), "it came too late"))]
    stand(group, {A: 1})


def test_one_that_tells_of_a_broken_broadcast_is_left_out_the_second_time_only() -> None:
    group, fleet = UpdateGroup(1), {A: 1, B: 1}
    for again in (False, True):
        stand(group, fleet)
        broadcast(group, fleet, Version(1, 2))
        assert group.broken(A, "a", group.group, "its connection broke") and not group.broken(B, "b", group.group, "so did mine")
        if again:
            assert announce(group, fleet)[-1] == (TRAINER, OpenUpdateGroup(group.group, 2))


def test_failures_are_forgotten_when_a_broadcast_has_gone_well() -> None:
    group, fleet = UpdateGroup(1), {A: 1}
    for _ in range(3):
        stand(group, fleet)
        broadcast(group, fleet, Version(1, 2))
        broadcast(group, fleet, Version(1, 3))
        group.broken(A, "a", group.group, "its connection broke")


def test_what_is_said_of_an_earlier_group_is_ignored() -> None:
    group = UpdateGroup(1)
    stand(group, {A: 1})
    group.broken(A, "a", group.group, "broke")
    announce(group, {A: 1})
    assert group.broken(A, "a", "weights-1-1", "broke") == [] and group.opened(UpdateGroupOpened("weights-1-1", "x", 1, "gloo", [])) == []
    group.opened(opened(group))
    group.joined(A, "weights-1-1")
    group.joined(TRAINER, group.group)
    assert group.phase is Phase.joining


class AnyOrder(RuleBasedStateMachine):
    """Workers come, go, answer or do not, time passes. A trainer that waits is told something; nobody but members is, once they have joined."""

    def __init__(self) -> None:
        super().__init__()
        self.group, self.now, self.step = UpdateGroup(1), 0.0, 0
        self.fleet: dict[bytes, int] = {}
        self.inside: dict[bytes, str] = {}
        self.prepared: set[bytes] = set()
        self.waits = False

    def sent(self, messages: list[tuple[bytes | None, Message]]) -> None:
        for peer, message in messages:
            assert peer is not None
            if isinstance(message, LeaveUpdateGroup):
                self.inside.pop(peer, None)
                self.prepared.discard(peer)
            elif isinstance(message, PrepareBroadcast):
                assert self.inside[peer] == message.group and self.waits and message.version == Version(1, self.step)
            elif isinstance(message, BroadcastRefused | Broadcast):
                assert isinstance(message, BroadcastRefused) or self.inside[peer] == message.group
                if peer == TRAINER:
                    assert self.waits and message.version == Version(1, self.step)
                    assert isinstance(message, BroadcastRefused) or self.prepared == set(self.group.members.ranks)
                    self.waits = False
        if not self.waits:
            self.prepared.clear()

    @rule(peer=st.sampled_from([A, B, C]), ranks=st.integers(0, 2))
    def changes(self, peer: bytes, ranks: int) -> None:
        self.fleet.pop(peer, None)
        if ranks:
            self.fleet[peer] = ranks

    @rule(peer=st.sampled_from([A, B, C]))
    def dies(self, peer: bytes) -> None:
        self.fleet.pop(peer, None)
        self.sent(self.group.lost(peer, peer.decode()))

    @precondition(lambda self: not self.waits)
    @rule()
    def announces(self) -> None:
        self.group.announced(self.now)

    @precondition(lambda self: not self.waits)
    @rule(settled=st.booleans())
    def considers(self, settled: bool) -> None:
        self.sent(self.group.consider(TRAINER, self.fleet, settled, self.now))

    @precondition(lambda self: self.group.phase is Phase.opening)
    @rule()
    def opens(self) -> None:
        self.sent(self.group.opened(opened(self.group)))

    @precondition(lambda self: self.group.phase is Phase.joining)
    @rule(data=st.data())
    def joins(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(self.group.members.all))
        self.inside[peer] = self.group.group
        self.sent(self.group.joined(peer, self.group.group))

    @precondition(lambda self: not self.waits)
    @rule()
    def wants(self) -> None:
        self.step += 1
        self.waits = True
        self.sent(self.group.wanted(TRAINER, Version(1, self.step), self.fleet, self.now))

    @precondition(lambda self: self.group.phase is Phase.preparing)
    @rule(data=st.data())
    def is_ready(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(list(self.group.members.ranks)))
        self.prepared.add(peer)
        self.sent(self.group.ready(peer, BroadcastReady(self.group.group, Version(1, self.step))))

    @rule(peer=st.sampled_from([TRAINER, A, B, C]))
    def breaks(self, peer: bytes) -> None:
        self.sent(self.group.broken(peer, peer.decode(), self.group.group, "broke"))

    @rule(seconds=st.sampled_from([1.0, PREPARE_S + 1, JOIN_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.sent(self.group.expire(NAMES, self.now))

    @invariant()
    def nobody_is_kept_waiting_for_long(self) -> None:
        assert not self.waits or self.group.phase is Phase.preparing

    @invariant()
    def nobody_stays_in_a_group_that_was_given_up(self) -> None:
        assert self.group.phase is not Phase.none or not self.inside

    def teardown(self) -> None:
        self.now += JOIN_S + PREPARE_S + 1
        self.sent(self.group.expire(NAMES, self.now))
        assert not self.waits


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase

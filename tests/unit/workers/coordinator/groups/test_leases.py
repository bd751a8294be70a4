"""Who gets the next lease, and whose turn it is, with the real coordinator over workers of many kinds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group
from tests.unit.workers.coordinator.test_core import ROLLOUT, TRAINER, Play
from workers.coordinator.groups.lease_routing import KV_AHEAD, Room, Rooms, room_of
from workers.coordinator.registered_worker import Worker
from workers.messages.from_coordinator import Leases
from workers.messages.from_worker import BatchRequest, CheckpointRequest, GroupFinished, Heartbeat, Register
from workers.messages.parts import HeldLease, Lease, Purpose, Role, Version

SIZE = 2
BIG = {"rollout__concurrency": 1000, "staleness__eta": 400, "run__num_steps": 1000, "workflow__group_size": SIZE}


WORKERS = st.tuples(st.sampled_from([b"a", b"b", b"c", b"d", b"e"]), st.integers(0, 50), st.integers(0, 50), st.integers(0, 10_000), st.booleans())


@given(st.lists(WORKERS, max_size=30), st.sampled_from([2, 5]))
def test_the_least_busy_of_those_with_room(changes: list[tuple[bytes, int, int, int, bool]], size: int) -> None:
    """Whatever the rooms were before, workers of (peer, capacity, leased, tokens, suspect); without capacity one takes no leases."""
    rooms = Rooms(5, [2])
    for peer, capacity, leased, tokens, suspect in changes:
        rooms.put(peer, Room(capacity, capacity - leased, tokens, peer[0], suspect) if capacity else None)
        able = {peer: room for peer, room in rooms.rooms.items() if not room.suspect} or rooms.rooms
        with_room = {peer: (room.tokens / room.capacity, -room.free, room.slot) for peer, room in able.items() if room.free >= size}
        assert rooms.least_busy(size) == min(with_room, key=with_room.__getitem__, default=None)
        trusted = [room for room in rooms.rooms.values() if not room.suspect]
        assert rooms.num_groups == sum(room.capacity // 5 for room in trusted or rooms.rooms.values())
        rooms.keep_for_group()
        fits = {peer: (-room.free, room.slot) for peer, room in able.items() if room.capacity >= 5}
        kept = min(fits, key=fits.__getitem__, default=None)
        others = {peer: key for peer, key in with_room.items() if peer != kept}
        assert rooms.least_busy(size) == min(others, key=others.__getitem__, default=None)
        rooms.let_go()


@given(st.lists(st.integers(0, 5000), min_size=2, max_size=6), st.integers(1, 60), st.integers(1, 300))
def test_leases_even_out_what_is_in_flight(tokens: list[int], num_leases: int, each: int) -> None:
    """Whoever is behind is filled up first, so nobody gets ahead of another by more than the one lease that was given last."""
    routing = Rooms(SIZE, [1])
    for number, begun in enumerate(tokens):
        routing.put(b"%d" % number, Room(1000, 1000, float(begun), number))
    for _ in range(num_leases):
        peer = routing.least_busy(SIZE)
        assert peer is not None
        room = routing.rooms[peer]
        routing.put(peer, Room(1000, room.free - SIZE, room.tokens + each, room.slot))
    rooms = dict(sorted(routing.rooms.items()))
    got = {peer: room.tokens - begun for (peer, room), begun in zip(rooms.items(), tokens, strict=True)}
    assert sum(got.values()) == num_leases * each
    for peer in (peer for peer in rooms if got[peer]):
        assert all(rooms[peer].tokens - each <= other.tokens for other in rooms.values())


def test_what_a_worker_measures_counts_as_far_as_it_still_runs() -> None:
    def room(worker: Worker, *leased: tuple[str, int, int]) -> tuple[int, float]:
        found = room_of(worker, leased, 100.0)
        assert found.capacity == 20
        return found.free, found.tokens

    measured = frozenset({("g0", 0), ("g1", 0), ("g2", 5)})
    worker = Worker(b"w", Role.rollout, 0, "node", 1, 0.0, capacity=20, tokens_in_flight=900, measured=measured)
    assert room(worker, ("g0", 0, 2), ("g1", 0, 2), ("g2", 5, 2)) == (14, 900.0)
    assert room(worker, ("g0", 0, 2)) == (18, 300.0), "two of three have finished since"
    assert room(worker, ("g0", 0, 2), ("g7", 0, 2)) == (16, 500.0), "and one is younger than the heartbeat"
    assert room(worker, ("g2", 6, 2)) == (18, 200.0), "another attempt is another lease"
    silent = Worker(b"w", Role.rollout, 0, "node", 1, 0.0, capacity=20, measured=frozenset({("g0", 0)}))
    assert room(silent, ("g0", 0, 2)) == (18, 200.0), "a worker that measures nothing is reckoned by its samples"
    worker.live = 3
    assert room(worker, ("g0", 0, 2), ("g1", 0, 2), ("g2", 5, 2)) == (17, 900.0), "half of the samples have come to their end"
    assert room(worker, ("g0", 0, 2), ("g7", 0, 2)) == (16, 500.0), "of a group that is left no more live than it has"


@given(st.lists(st.tuples(st.integers(1, 8), st.booleans(), st.integers(0, 8)), max_size=12), st.integers(0, 60))
def test_samples_that_have_ended_leave_room_and_no_others(groups: list[tuple[int, bool, int]], capacity: int) -> None:
    """Groups of (samples, told of by a heartbeat, those of them that still run)."""
    told = frozenset((f"g{number}", 0) for number, (_, known, _) in enumerate(groups) if known)
    running = sum(min(live, size) for size, known, live in groups if known)
    worker = Worker(b"w", Role.rollout, 0, "node", 1, 0.0, capacity=capacity, measured=told, live=running)
    room = room_of(worker, [(f"g{number}", 0, size) for number, (size, _, _) in enumerate(groups)], 1.0)
    assert room.free == capacity - running - sum(size for size, known, _ in groups if not known)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 20_000), st.integers(0, 5_000), st.floats(0.5, 1_000), st.integers(1, 16))
def test_a_small_cache_leaves_room_for_fewer_samples(capacity: int, live: int, tokens: int, kv: int, each: float, least: int) -> None:
    """`kv`: tokens of the cache, 0: not known; never more than without, never less than a group, and what runs fits half as much again."""
    worker = Worker(b"w", Role.rollout, 0, "node", 1, 0.0, capacity=capacity, tokens_in_flight=tokens, measured=frozenset({("g", 0)}), live=live,
                    kv_tokens=kv)
    leased = [("g", 0, live)] if live else []
    room = room_of(worker, leased, each, least)
    worker.kv_tokens = 0
    unlimited = room_of(worker, leased, each, least)
    assert min(capacity, least) <= room.capacity <= unlimited.capacity == capacity and room.free == room.capacity - live
    held = tokens if live else 0
    held = live * each if live and not tokens else held
    if kv and room.capacity > max(least, live):
        assert held + room.free * each <= KV_AHEAD * kv * (1 + 1e-9)
    if not kv or held + (capacity - live) * each <= KV_AHEAD * kv:
        assert room == unlimited
    if kv and held + least * each <= KV_AHEAD * kv and capacity >= live + least:
        assert room.free >= least, "one long straggler keeps nobody waiting"


def test_leases_go_where_the_cache_has_room() -> None:
    """Two workers with the same slots; the cache of one holds a tenth of what answers come to."""
    fleet = Fleet(Play(workflow__max_new_tokens=200, **BIG), {b"a": 40, b"b": 40})
    fleet.beat(b"a", 40, kv_tokens=400)
    fleet.beat(b"b", 40, kv_tokens=40_000)
    assert 4 < fleet.samples(b"a") <= 6, "1.5 x 400 tokens, at 100 a sample"
    assert 38 < fleet.samples(b"b") <= 40
    fleet.beat(b"a", 40, tokens=50 * fleet.samples(b"a"), kv_tokens=400, live=fleet.samples(b"a"))
    assert 6 < fleet.samples(b"a") <= 9, "those that run come to half of what was expected: the other half is for new ones"


@dataclass
class Fleet:
    """Rollout workers of a coordinator that go by their messages alone."""

    play: Play
    capacities: dict[bytes, int]
    held: dict[bytes, dict[str, Lease]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.play.tell(TRAINER, Register(Role.trainer, "node", 2))
        self.play.publish(0)
        for peer in self.capacities:
            self.held[peer] = {}
            self.play.tell(peer, Register(Role.rollout, f"node{peer!r}", 1))

    def samples(self, peer: bytes) -> int:
        return sum(1 if lease.purpose is Purpose.evaluation else SIZE for lease in self.held[peer].values())

    def beat(self, peer: bytes, capacity: int, tokens: int = 0, kv_tokens: int = 0, live: int | None = None) -> None:
        self.capacities[peer] = capacity
        leases = [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in self.held[peer].values()]
        held = Version(7, max(0, self.play.core.training.step))
        self.handle(peer, Heartbeat(held=held, capacity=capacity, leases=leases, tokens_in_flight=tokens, kv_tokens=kv_tokens, live=live))

    def finish(self, peer: bytes, group_id: str) -> None:
        lease = self.held[peer].pop(group_id)
        size = 1 if lease.purpose is Purpose.evaluation else SIZE
        group = make_group(group_id, lease.attempt, [lease.version.step] * size, rewards=[1.0] * size, purpose=lease.purpose)
        self.handle(peer, GroupFinished(group))

    def handle(self, peer: bytes, message) -> None:
        self.play.now += 0.01
        self.play.core.handle(peer, message, self.play.now)
        sent, self.play.core.outbox = self.play.core.outbox, []
        for whom, answer in sent:
            if isinstance(answer, Leases):
                assert whom is not None
                for lease in answer.leases:
                    assert not any(lease.group_id in held for held in self.held.values()), "a group is whole, and with one worker"
                    self.held[whom][lease.group_id] = lease
                assert self.samples(whom) <= self.capacities[whom], "capacity is never exceeded by a lease"


kinds = st.sampled_from(["beat", "beat", "finish"])
events = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), kinds, st.integers(0, 9), st.integers(0, 3000)), max_size=60)


@settings(max_examples=60)
@given(events)
def test_capacity_is_never_exceeded_and_room_is_never_left_where_there_is_work(happening: list[tuple[bytes, str, int, int]]) -> None:
    fleet = Fleet(Play(**BIG), {b"a": 4, b"b": 9, b"c": 2})
    for peer, capacity in list(fleet.capacities.items()):
        fleet.beat(peer, capacity)
    for peer, event, number, tokens in happening:
        if event == "beat":
            fleet.beat(peer, number, tokens)
        elif fleet.held[peer]:
            fleet.finish(peer, sorted(fleet.held[peer])[number % len(fleet.held[peer])])
        if not fleet.play.core.evaluation.active:
            assert all(capacity - fleet.samples(peer) < SIZE for peer, capacity in fleet.capacities.items()), "training has no end here"


def test_a_worker_with_long_answers_gets_fewer_groups() -> None:
    """Two workers alike but for the length of what they generate: what is in flight is even, not the number of groups."""
    each = {b"long": 800, b"short": 200}  # tokens of a group
    fleet = Fleet(Play(**{**BIG, "rollout__concurrency": 10}), dict.fromkeys(each, 0))
    for peer in each:
        fleet.beat(peer, 40)
    while fleet.play.core.evaluation.active:
        fleet.finish(*next((peer, group_id) for peer, held in fleet.held.items() for group_id in held if group_id[0] == "e"))
    for turn in range(100):
        peer = (b"long", b"short")[turn % 2]
        if fleet.held[peer]:
            fleet.finish(peer, next(iter(fleet.held[peer])))
        for other in each:
            fleet.beat(other, 40, each[other] * len(fleet.held[other]))
    assert sum(map(len, fleet.held.values())) == 10
    in_flight = {peer: each[peer] * len(held) for peer, held in fleet.held.items()}
    assert abs(in_flight[b"long"] - in_flight[b"short"]) <= max(each.values()), in_flight
    assert len(fleet.held[b"short"]) > 2 * len(fleet.held[b"long"])


def evaluating(capacity: int, num_prompts: int) -> Fleet:
    """The evaluation of step 1 has just begun while training goes on; one worker, who holds that version."""
    play = Play(evaluation__every_steps=1, **BIG)
    fleet = Fleet(play, {ROLLOUT: 20})
    fleet.beat(ROLLOUT, 20)
    play.tell(TRAINER, BatchRequest(0))
    while not play.core.training.in_training:
        fleet.finish(ROLLOUT, next(iter(fleet.held[ROLLOUT])))
    while sum(lease.purpose is Purpose.training for lease in fleet.held[ROLLOUT].values()) * SIZE > capacity:
        fleet.capacities[ROLLOUT] = 0
        fleet.beat(ROLLOUT, 0)
        fleet.finish(ROLLOUT, next(iter(fleet.held[ROLLOUT])))
    office = play.core.office
    office.heldout = [office.heldout[0]] * num_prompts
    play.core.evaluation.num_prompts = num_prompts
    play.publish(1)
    fleet.beat(ROLLOUT, capacity)
    return fleet


@pytest.mark.parametrize("capacity", [2, 3, 7, 24])
def test_generation_for_training_goes_on_during_an_evaluation(capacity: int) -> None:
    fleet = evaluating(capacity, 60)
    evaluation, order = fleet.play.core.evaluation, []
    assert evaluation.active and evaluation.step == 1
    while evaluation.has_work:
        before = set(fleet.held[ROLLOUT])
        fleet.finish(ROLLOUT, next(iter(fleet.held[ROLLOUT])))
        order += [lease.purpose for group_id, lease in fleet.held[ROLLOUT].items() if group_id not in before]
    assert order.count(Purpose.evaluation) >= 60 - capacity, "the evaluation got on"
    longest = max(len(list(run)) for purpose, run in itertools.groupby(order) if purpose is Purpose.evaluation)
    assert longest <= 2 * SIZE, "training never waits for more than its share"
    samples = {purpose: order.count(purpose) * size for purpose, size in ((Purpose.evaluation, 1), (Purpose.training, SIZE))}
    assert abs(samples[Purpose.evaluation] - samples[Purpose.training]) <= capacity + SIZE, "sample for sample"


def test_generation_goes_on_while_a_checkpoint_is_written() -> None:
    fleet = evaluating(24, 2)
    play = fleet.play
    play.core.handle(TRAINER, CheckpointRequest(1, play.folder), play.now)
    assert play.core.checkpoint is not None, "and it stays there until the state has been taken"
    before = play.core.ledger.next_index
    for _ in range(8):
        fleet.finish(ROLLOUT, next(iter(fleet.held[ROLLOUT])))
    assert play.core.ledger.next_index > before


def test_only_the_first_evaluation_goes_before_training() -> None:
    fleet = Fleet(Play(**BIG), {ROLLOUT: 4})
    fleet.beat(ROLLOUT, 4)
    assert [lease.purpose for lease in fleet.held[ROLLOUT].values()] == [Purpose.evaluation] * 3


def test_prompts_of_an_evaluation_are_not_held_back_by_a_group_that_no_worker_has_room_for() -> None:
    fleet = evaluating(24, 60)
    fleet.beat(ROLLOUT, SIZE - 1)
    for _ in range(120):
        if fleet.held[ROLLOUT]:
            fleet.finish(ROLLOUT, next(iter(fleet.held[ROLLOUT])))
    assert not fleet.play.core.evaluation.active, "with room for single samples only, it comes to its end"

"""The staleness policy: admission, the hard bound, and that neither can deadlock, for any interleaving of events."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group, make_partial
from workers.config import Bound, Control, StalenessConfig
from workers.coordinator.groups.lead import Lead
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.staleness import FinishedGroup, StalenessPolicy
from workers.messages.parts import HeldLease, Purpose, Version

NAMES = [
    "nothing", "admit", "admit", "admit", "finish", "finish", "reject", "fail", "park", "lose", "come_back", "appear", "form", "train",
    "measure"]
# The length is bounded from below, or most histories would be of five events; shrunk ones have `nothing` instead.
EVENTS = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 1000)), min_size=30, max_size=150)
WORKER = b"worker"


class Simulation:
    """A ledger and a policy driven by arbitrary events, checking every invariant after each.

    `begun`: the version of a group's oldest token. Leases that were given up for lost may still be worked on somewhere, and come back.
    `formed`: the batches of this step and the next ones that are not trained on yet; the trainer asks for `ahead` of them in advance.
    """

    def __init__(self, eta: int, batch: int, bound: Bound, ahead: int = 0, warmup: int = 0, control: Control = Control.eta) -> None:
        self.ahead, self.formed = ahead, list[list[str]]()
        self.lead = Lead(StalenessConfig(eta, control=control))
        self.policy, self.ledger, self.version = StalenessPolicy(eta, batch, bound, warmup_steps=warmup, lead=self.lead), Ledger(max_attempts=2), 0
        self.begun: dict[tuple[str, int], int] = {}
        self.lost: list[tuple[str, int]] = []
        self.consumed: list[str] = []
        self.rejected: list[str] = []

    def nothing(self, _: int) -> None:
        pass

    def admit(self, _: int = 0) -> bool:
        if not self.ledger.parked and not self.policy.may_admit(self.ledger.admitted, self.version):
            return False
        leased = self.ledger.lease(WORKER, self.version)
        begun = self.begun[leased.group_id, leased.partial.attempt] if leased.partial is not None else self.version
        assert leased.admitted_at == begun
        self.begun[leased.group_id, leased.attempt] = begun
        return True

    def _pick(self, number: int) -> tuple[str, int] | None:
        running = sorted(self.ledger.running)
        return (group_id := running[number % len(running)], self.ledger.running[group_id].attempt) if running else None

    def finish(self, number: int) -> None:
        if (key := self._pick(number)) is not None:
            group = make_group(*key, [self.begun[key]])
            assert self.ledger.finish(group)
            assert not self.ledger.finish(group), "a duplicate must not count"

    def reject(self, number: int) -> None:
        if (key := self._pick(number)) is not None:
            admitted = self.ledger.admitted
            assert self.ledger.reject(*key) and self.ledger.admitted == admitted - 1, "its place is free"
            assert not self.ledger.reject(*key) and not self.ledger.finish(make_group(*key, [self.begun[key]])), "a duplicate must not count"
            self.rejected.append(key[0])

    def fail(self, number: int) -> None:
        if (key := self._pick(number)) is not None:
            assert self.ledger.fail(*key, "failed")
            assert not self.ledger.fail(*key, "failed")

    def park(self, number: int) -> None:
        if (key := self._pick(number)) is not None:
            assert self.ledger.park(make_partial(*key, [self.begun[key]]))
            assert not self.ledger.park(make_partial(*key, [self.begun[key]]))

    def lose(self, number: int) -> None:
        if (key := self._pick(number)) is not None:
            held = {(group_id, lease.attempt) for group_id, lease in self.ledger.running.items()} - {key}
            assert self.ledger.reconcile(WORKER, held, 0, 0.0, 0) == 1
            self.lost.append(key)

    def come_back(self, number: int) -> None:
        if self.lost:
            self._adopt(self.lost[number % len(self.lost)])

    def appear(self, number: int) -> None:
        """A lease from a lost lineage, of a prompt that this one has not come to yet."""
        key = f"g{self.ledger.next_index + number % 3}", 0
        self.begun[key] = max(0, self.version - number // 3 % 4)
        self._adopt(key)

    def _adopt(self, key: tuple[str, int]) -> None:
        held = HeldLease(*key, Purpose.training, Version(1, self.begun[key]))
        next_batch = self.ledger.num_taken // self.policy.batch_groups
        may = self.policy.may_return(self.ledger.admitted, self.version, self.begun[key], self.ledger.unconsumed_versions(), next_batch)
        self.ledger.adopt(WORKER, held, self.begun[key], may)

    def form(self, _: int = 0) -> bool:
        step = self.version + len(self.formed)
        if not self.policy.may_form(step, self.ledger.finished.versions, self.ledger.running_versions()) or len(self.formed) > self.ahead:
            return False
        chosen = self.policy.choose(self.ledger.waiting_to_be_consumed())
        assert len(set(chosen)) == self.policy.batch_groups
        ages = [step - self.begun[group_id, self.ledger.finished[group_id].group.attempt] for group_id in chosen]
        assert min(ages) >= 0
        if self.policy.bound is Bound.hard or self.policy.eta == 0:
            assert max(ages) <= self.policy.eta
        self.ledger.take(chosen)
        self.formed.append(chosen)
        return True

    def train(self, _: int = 0) -> bool:
        if not self.formed and not self.form():
            return False
        chosen = self.formed.pop(0)
        self.ledger.consume(chosen)
        self.consumed += chosen
        self.version += 1
        return True

    def measure(self, number: int) -> None:
        """Whatever the last step found; 1000 is not a number."""
        gap = number / 500 if number < 1000 else math.nan
        self.lead.finished(self.version, {"gap_proximal_behavior": gap}, number % 7, self.policy.furthest(self.version), number % 11 / 2,
                           number % 5 / 4)

    def check(self) -> None:
        assert 0 <= self.policy.ahead(self.version) <= self.policy.eta
        assert self.policy.may_be(self.ledger.admitted, self.version)
        warmup = self.policy.warmup_steps
        lead = self.policy.eta * min(1.0, self.version / warmup) if warmup else self.policy.eta
        assert self.ledger.admitted <= math.ceil((self.version + lead + 1) * self.policy.batch_groups)
        assert len(self.consumed) == len(set(self.consumed)), "consumed twice"
        assert len(self.rejected) == len(set(self.rejected)) == self.ledger.num_rejected, "rejected, and leased again"
        assert not set(self.rejected) & {*self.consumed, *self.ledger.running, *self.ledger.parked, *self.ledger.finished}
        assert self.policy.eta or len(self.formed) < 2, "a batch of the next version, before that is there"


@pytest.mark.parametrize("bound", list(Bound))
@given(eta=st.integers(0, 5), batch=st.integers(1, 5), ahead=st.integers(0, 2), warmup=st.sampled_from([0, 0, 3, 10]),
       control=st.sampled_from(Control), events=EVENTS)
@settings(max_examples=200, deadline=None)
def test_invariants_hold_for_any_interleaving(bound: Bound, eta: int, batch: int, ahead: int, warmup: int, control: Control,
                                              events: list[tuple[str, int]]) -> None:
    """However far ahead of its step a batch is formed, and wherever the lead goes."""
    simulation = Simulation(eta, batch, bound, ahead, warmup, control)
    for name, number in events:
        getattr(simulation, name)(number)
        simulation.check()
    # No deadlock: when everything that runs has ended, and what may be admitted has run too, the next batch can be formed.
    for _ in range(3):
        while simulation.admit():
            pass
        for number in range(len(simulation.ledger.running)):
            simulation.finish(number)
        assert simulation.train()
        simulation.check()


@pytest.mark.parametrize("bound", list(Bound))
@given(eta=st.integers(0, 5), batch=st.integers(1, 5), ahead=st.integers(0, 2), events=EVENTS,
       num_rejected=st.lists(st.integers(0, 9), min_size=3, max_size=3))
@settings(max_examples=100, deadline=None)
def test_however_many_are_rejected_the_batch_fills(bound: Bound, eta: int, batch: int, ahead: int, events: list[tuple[str, int]],
                                                   num_rejected: list[int]) -> None:
    """Before each acceptable group of a step so many are rejected; nothing but their replacements is needed for the batch."""
    simulation = Simulation(eta, batch, bound, ahead)
    for name, number in events:
        getattr(simulation, name)(number)
    for step in range(3):
        version = simulation.version
        while not simulation.train():
            for _ in range(num_rejected[step]):
                simulation.admit()
                simulation.reject(0)
                simulation.check()
            assert simulation.admit() or simulation.ledger.running, "neither a group under way nor a place for one"
            simulation.finish(0)
            simulation.check()
        assert simulation.version == version + 1


@given(eta=st.integers(0, 5), batch=st.integers(1, 5), ahead=st.integers(0, 1), events=EVENTS)
@settings(max_examples=100, deadline=None)
def test_hard_bound_forms_a_batch_once_running_groups_end(eta: int, batch: int, ahead: int, events: list[tuple[str, int]]) -> None:
    """Without any new admission: if at least B groups are unconsumed, ending the running ones is enough."""
    simulation = Simulation(eta, batch, Bound.hard, ahead)
    for name, number in events:
        getattr(simulation, name)(number)
    while simulation.ledger.parked:
        assert simulation.admit()
    while simulation.ledger.running:
        simulation.finish(0)
    while len(simulation.ledger.finished) >= batch:
        assert simulation.train()


def test_eta_zero_is_synchronous() -> None:
    """With eta=0 exactly B groups start under each version, and they make the batch of that version."""
    simulation = Simulation(0, 4, Bound.admission)
    for version in range(5):
        admitted = sum(iter(simulation.admit, False))
        assert admitted == 4
        assert not simulation.admit()
        for _ in range(4):
            simulation.finish(0)
        assert simulation.train()
        assert all(simulation.begun[group_id, 0] == version for group_id in simulation.consumed[-4:])


@pytest.mark.parametrize("target", [None, 2.0])
def test_the_lead_grows_in_the_warm_up(target: float | None) -> None:
    """Synchronous at first, and from the last warm-up step on as without."""
    policy, free = StalenessPolicy(4, 8, Bound.admission, target, warmup_steps=8), StalenessPolicy(4, 8, Bound.admission, target)
    most = 4.0 if target is None else target
    assert [policy.ahead(version) for version in range(12)] == [most * min(1, version / 8) for version in range(12)]
    assert policy.may_admit(7, 0) and not policy.may_admit(8, 0) and policy.may_admit(8, 0) is StalenessPolicy(0, 8, Bound.admission).may_admit(8, 0)
    assert all(policy.may_admit(admitted, 8) is free.may_admit(admitted, 8) for admitted in range(120))


def test_eta_zero_replaces_rejected_groups_at_the_same_version() -> None:
    simulation = Simulation(0, 4, Bound.admission)
    assert sum(iter(simulation.admit, False)) == 4
    for _ in range(6):
        simulation.reject(0)
        assert simulation.admit() and not simulation.admit(), "one for one"
    for _ in range(4):
        simulation.finish(0)
    assert simulation.train() and simulation.consumed == ["g6", "g7", "g8", "g9"]


def test_admission_takes_the_oldest_finished_first() -> None:
    policy = StalenessPolicy(4, 2, Bound.admission)
    finished = [FinishedGroup("late", 0, 7), FinishedGroup("first", 3, 1), FinishedGroup("second", 2, 2)]
    assert policy.may_form(3, {0: 1, 2: 1, 3: 1}, {0: 1}) and policy.choose(finished) == ["first", "second"]


def test_hard_waits_for_a_straggler_that_must_not_miss_its_deadline() -> None:
    policy = StalenessPolicy(1, 1, Bound.hard)
    assert not policy.may_form(1, {1: 1}, {0: 1}), "the group begun at 0 must be in batch 1"
    assert policy.may_form(1, {1: 1}, {1: 1}) and policy.choose([FinishedGroup("fresh", 1, 0)]) == ["fresh"]


@given(st.integers(0, 4), st.integers(1, 4), st.integers(0, 6), st.lists(st.integers(0, 8), max_size=20), st.lists(st.integers(0, 8), max_size=20))
def test_hard_counts_as_if_it_looked_at_each_group(eta: int, batch: int, version: int, finished: list[int], running: list[int]) -> None:
    deadlines = sorted(admitted_at + eta for admitted_at in [*sorted(finished)[batch:], *running])
    each_in_time = all(version + 1 + number // batch <= deadline for number, deadline in enumerate(deadlines))
    may = StalenessPolicy(eta, batch, Bound.hard).may_form(version, Counter(finished), Counter(running))
    assert may == (len(finished) >= batch and each_in_time)


def test_a_group_that_comes_back_needs_a_place() -> None:
    for bound in Bound:
        policy = StalenessPolicy(1, 2, bound)
        assert policy.may_return(3, 0, 0, Counter([0, 0, 0]), 0)
        assert not policy.may_return(4, 0, 0, Counter([0, 0, 0, 0]), 0)


@pytest.mark.parametrize(("eta", "bound", "may"), [
    (4, Bound.admission, True), (4, Bound.hard, False), (0, Bound.admission, False), (0, Bound.hard, False)])
def test_a_group_that_comes_back_too_old_is_wanted_only_where_ages_are_not_bounded(eta: int, bound: Bound, may: bool) -> None:
    assert StalenessPolicy(eta, 1, bound).may_return(9, 9, 9 - eta - 1, Counter([]), 9) is may
    assert StalenessPolicy(eta, 1, bound).may_return(9, 9, 9 - eta, Counter([]), 9)


def test_a_group_that_comes_back_must_not_make_others_late() -> None:
    """Three groups must be in batch 5 or before, and only two fit."""
    assert StalenessPolicy(2, 2, Bound.hard).may_return(12, 5, 3, [3], 5)
    assert not StalenessPolicy(2, 2, Bound.hard).may_return(12, 5, 3, [3, 3], 5)
    assert not StalenessPolicy(2, 2, Bound.hard).may_return(12, 5, 4, [3, 3, 4, 4], 5)
    assert StalenessPolicy(2, 2, Bound.admission).may_return(12, 5, 3, [3, 3], 5)

"""The staleness policy: admission, the hard bound, and that neither can deadlock, for any interleaving of events."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.groups import make_group
from workers.config import Bound
from workers.coordinator.ledger import Ledger
from workers.coordinator.staleness import FinishedGroup, StalenessPolicy

EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "finish", "fail", "lose", "train"]), st.integers(0, 1000)), max_size=400)


class Simulation:
    """A ledger and a policy driven by arbitrary events, checking every invariant after each."""

    def __init__(self, eta: int, batch: int, bound: Bound) -> None:
        self.policy, self.ledger, self.version = StalenessPolicy(eta, batch, bound), Ledger(max_attempts=2), 0
        self.begun: dict[str, int] = {}
        self.attempts: dict[str, int] = {}
        self.consumed: list[str] = []

    def admit(self, _: int = 0) -> bool:
        if not self.policy.may_admit(self.ledger.admitted, self.version):
            return False
        group_id, _, attempt = self.ledger.lease(b"worker", self.version)
        self.begun[group_id], self.attempts[group_id] = self.version, attempt
        return True

    def _pick(self, number: int) -> str | None:
        running = sorted(self.ledger.running)
        return running[number % len(running)] if running else None

    def finish(self, number: int) -> None:
        if (group_id := self._pick(number)) is not None:
            group = make_group(group_id, self.attempts[group_id], [self.begun[group_id]])
            assert self.ledger.finish(group)
            assert not self.ledger.finish(group), "a duplicate must not count"

    def fail(self, number: int) -> None:
        if (group_id := self._pick(number)) is not None:
            assert self.ledger.fail(group_id, self.attempts[group_id], "failed")

    def lose(self, _: int) -> None:
        self.ledger.release(b"worker")

    def train(self, _: int = 0) -> bool:
        chosen = self.policy.choose(self.version, self.ledger.waiting_to_be_consumed(), self.ledger.running_versions())
        if chosen is None:
            return False
        assert len(set(chosen)) == self.policy.batch_groups
        if self.policy.bound is Bound.hard:
            assert all(self.version - self.begun[group_id] <= self.policy.eta for group_id in chosen)
        self.ledger.consume(chosen)
        self.consumed += chosen
        self.version += 1
        return True

    def check(self) -> None:
        limit = (self.version + self.policy.eta + 1) * self.policy.batch_groups
        assert self.ledger.admitted <= limit
        assert len(self.consumed) == len(set(self.consumed)), "consumed twice"


@pytest.mark.parametrize("bound", list(Bound))
@given(eta=st.integers(0, 5), batch=st.integers(1, 5), events=EVENTS)
@settings(max_examples=300, deadline=None)
def test_invariants_hold_for_any_interleaving(bound: Bound, eta: int, batch: int, events: list[tuple[str, int]]) -> None:
    simulation = Simulation(eta, batch, bound)
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


@given(eta=st.integers(0, 5), batch=st.integers(1, 5), events=EVENTS)
@settings(max_examples=200, deadline=None)
def test_hard_bound_forms_a_batch_once_running_groups_end(eta: int, batch: int, events: list[tuple[str, int]]) -> None:
    """Without any new admission: if at least B groups are unconsumed, ending the running ones is enough."""
    simulation = Simulation(eta, batch, Bound.hard)
    for name, number in events:
        getattr(simulation, name)(number)
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
        assert all(simulation.begun[group_id] == version for group_id in simulation.consumed[-4:])


def test_admission_takes_the_oldest_finished_first() -> None:
    policy = StalenessPolicy(4, 2, Bound.admission)
    finished = [FinishedGroup("late", 0, 7), FinishedGroup("first", 3, 1), FinishedGroup("second", 2, 2)]
    assert policy.choose(3, finished, [0]) == ["first", "second"]


def test_hard_waits_for_a_straggler_that_must_not_miss_its_deadline() -> None:
    policy = StalenessPolicy(1, 1, Bound.hard)
    fresh = [FinishedGroup("fresh", 1, 0)]
    assert policy.choose(1, fresh, running=[0]) is None, "the group begun at 0 must be in batch 1"
    assert policy.choose(1, fresh, running=[1]) == ["fresh"]

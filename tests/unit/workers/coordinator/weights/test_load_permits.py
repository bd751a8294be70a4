"""Permits to load: never the whole fleet at once, in the order of asking, and never for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.coordinator.weights.load_permits import Grant, LoadPermits
from workers.messages.parts import Version

V1, V2 = Version(1, 1), Version(1, 2)
LIMIT_S = 10.0
WORKERS = [b"a", b"b", b"c", b"d", b"e"]
events = st.lists(st.tuples(st.sampled_from(["ask", "held", "lost", "wait"]), st.sampled_from(WORKERS), st.integers(1, 5)), max_size=80)


@given(st.sets(st.sampled_from(WORKERS)), events)
def test_at_most_half_of_those_that_generate_load_at_once(generating: set[bytes], happening: list[tuple[str, bytes, int]]) -> None:
    permits, now = LoadPermits(True, LIMIT_S), 0.0
    for event, worker, step in happening:
        if event == "ask":
            permits.ask(worker, Version(1, step), worker in generating, now)
        elif event == "held":
            permits.held(worker, Version(1, step))
        elif event == "lost":
            permits.lost(worker)
        else:
            now += step
        permits.expire(now)
        permits.grant(len(generating), now)
        loading = generating & permits.loading.keys()
        assert len(loading) <= max(1, len(generating) // 2)
        assert len(generating) < 2 or loading != generating, "somebody generates"
        assert not permits.loading.keys() & permits.waiting.keys()
        assert not permits.waiting.keys() - generating, "who does not generate waits for nobody"
        assert not permits.waiting or len(loading) == max(1, len(generating) // 2), "nobody waits without need"
        assert permits._num_interrupting == sum(permit.interrupts for permit in permits.loading.values())


@given(st.permutations(WORKERS), st.integers(2, 5))
def test_everybody_gets_a_turn_in_the_order_of_asking(order: list[bytes], num_generating: int) -> None:
    permits = LoadPermits(True, LIMIT_S)
    for worker in order[:num_generating]:
        permits.ask(worker, V1, True, 0.0)
    served: list[bytes] = []
    while permits.waiting:
        granted = permits.grant(num_generating, 0.0)
        assert granted, "as long as someone waits and nobody loads, someone may load"
        served += [grant.worker for grant in granted]
        for worker in permits.waiting:
            permits.ask(worker, V1, True, 0.0)  # again and again, which changes nothing
        for worker, version in granted:
            permits.held(worker, version)
    assert served == order[:num_generating]


def test_one_worker_is_never_made_to_wait_nor_one_that_does_not_generate_yet() -> None:
    permits = LoadPermits(True, LIMIT_S)
    permits.ask(b"a", V1, True, 0.0)
    assert permits.grant(1, 0.0) == [Grant(b"a", V1)]
    permits = LoadPermits(True, LIMIT_S)
    for worker in WORKERS:
        assert permits.ask(worker, V1, False, 0.0) == [Grant(worker, V1)]


def test_a_worker_that_came_to_generate_nothing_loads_at_once() -> None:
    permits = LoadPermits(True, LIMIT_S)
    permits.ask(b"a", V1, True, 0.0)
    assert permits.ask(b"a", V2, False, 0.0) == [Grant(b"a", V2)] and not permits.waiting


def test_without_rolling_all_load_at_once() -> None:
    permits = LoadPermits(False, LIMIT_S)
    assert all(permits.ask(worker, V1, True, 0.0) == [Grant(worker, V1)] for worker in WORKERS)


def test_a_grant_that_was_lost_is_given_again() -> None:
    permits = LoadPermits(True, LIMIT_S)
    permits.ask(b"a", V1, True, 0.0)
    permits.grant(2, 0.0)
    assert permits.ask(b"a", V1, True, 0.0) == [Grant(b"a", V1)]


def test_a_permit_ends_when_the_version_or_a_newer_one_is_held() -> None:
    permits = LoadPermits(True, LIMIT_S)
    for worker in (b"a", b"b"):
        permits.ask(worker, V2, True, 0.0)
    assert [grant.worker for grant in permits.grant(2, 0.0)] == [b"a"]
    permits.held(b"a", V1)
    assert permits.grant(2, 0.0) == [], "an older one is what it held before"
    permits.held(b"a", V2)
    assert permits.grant(2, 0.0) == [Grant(b"b", V2)]


def test_a_permit_ends_with_its_worker_or_its_time() -> None:
    permits = LoadPermits(True, LIMIT_S)
    for worker in (b"a", b"b", b"c"):
        permits.ask(worker, V1, True, 0.0)
    assert [grant.worker for grant in permits.grant(3, 0.0)] == [b"a"]
    permits.lost(b"a")
    assert [grant.worker for grant in permits.grant(2, 1.0)] == [b"b"]
    assert permits.expire(1.0 + LIMIT_S) == [] and permits.expire(1.5 + LIMIT_S) == [b"b"]
    assert [grant.worker for grant in permits.grant(2, 12.0)] == [b"c"]


def test_who_gives_up_a_version_for_a_newer_one_asks_anew() -> None:
    permits = LoadPermits(True, LIMIT_S)
    permits.ask(b"a", V1, True, 0.0)
    permits.grant(2, 0.0)
    permits.ask(b"b", V1, True, 0.0)
    assert permits.ask(b"a", V2, True, 0.0) == []
    assert [grant.worker for grant in permits.grant(2, 0.0)] == [b"b"], "those who waited go first"


def test_one_whose_engine_breaks_while_it_loads_keeps_nobody_waiting() -> None:
    permits = LoadPermits(True, LIMIT_S)
    for worker in (b"a", b"b"):
        permits.ask(worker, V1, True, 0.0)
    assert permits.grant(2, 0.0) == [Grant(b"a", V1)]
    permits.stands_still(b"a")
    permits.stands_still(b"a")
    assert permits.grant(1, 0.0) == [Grant(b"b", V1)]
    assert permits.ask(b"a", V1, False, 0.0) == [Grant(b"a", V1)], "it may load when it is back"
    permits.held(b"b", V1)
    assert permits._num_interrupting == 0

"""Which reward element gets the next request: hypothesis plays elements that come, go, break and are listed again."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.reward.remote.load_balancer import REST_S, UNLISTED_S, Balance

NAMES = st.sampled_from(["a", "b", "c"])


def test_the_least_busy_of_those_listed() -> None:
    balance = Balance()
    assert balance.least_busy(0.0) is None
    balance.listed(["a", "b"], 0.0)
    with balance.in_flight("a"):
        assert balance.least_busy(0.0) == "b"
        with balance.in_flight("b"), balance.in_flight("b"):
            assert balance.least_busy(0.0) == "a"


def test_a_lost_element_rests_and_is_tried_again() -> None:
    balance = Balance()
    balance.listed(["a"], 0.0)
    balance.lost("a", 10.0)
    assert balance.least_busy(10.0) is None
    assert balance.least_busy(10.0 + REST_S) == "a"


@pytest.mark.parametrize("busy", [False, True])
def test_an_element_that_is_not_listed_takes_nothing_new(busy: bool) -> None:
    balance = Balance()
    balance.listed(["a"], 0.0)
    with ExitStack() as flying:
        if busy:
            flying.enter_context(balance.in_flight("a"))
        balance.listed([], 10.0)
        assert balance.least_busy(10.0) is None
        assert balance.to_drop(10.0 + UNLISTED_S) == ([] if busy else ["a"])
        balance.listed(["a"], 20.0)
        assert balance.least_busy(20.0) == "a"
        balance.listed([], 30.0)
        assert balance.to_drop(31.0 + UNLISTED_S) == ["a"], "one that is stuck is given up"
        balance.listed(["a"], 200.0)
    assert balance.elements["a"].in_flight == 0, "what was in flight before it was dropped is not counted afterwards"


@given(st.lists(st.one_of(
    st.tuples(st.just("list"), st.sets(NAMES)), st.tuples(st.just("lost"), NAMES), st.tuples(st.just("send"), st.none()),
    st.tuples(st.just("done"), st.integers(0, 20)), st.tuples(st.just("drop"), st.none()), st.tuples(st.just("wait"), st.integers(0, 100))),
    max_size=60))
def test_the_next_element_is_always_one_that_can_take_it(happenings: list[tuple]) -> None:
    balance, now, listed = Balance(), 0.0, set()
    rests: dict[str, float] = {}
    flying: list[ExitStack] = []
    for what, value in happenings:
        match what:
            case "list":
                listed = value
                balance.listed(value, now)
            case "lost":
                balance.lost(value, now)
                if value in balance.elements:
                    rests[value] = now + REST_S
            case "send" if (endpoint := balance.least_busy(now)) is not None:
                flying.append(ExitStack())
                flying[-1].enter_context(balance.in_flight(endpoint))
            case "done" if flying:
                flying.pop(value % len(flying)).close()
            case "drop":
                for endpoint in balance.to_drop(now):
                    assert endpoint not in listed
                    rests.pop(endpoint, None)
            case "wait":
                now += value
        chosen = balance.least_busy(now)
        able = {endpoint for endpoint in listed if rests.get(endpoint, 0.0) <= now}
        assert (chosen in able) if able else chosen is None
        assert all(element.in_flight >= 0 for element in balance.elements.values())
        if chosen is not None:
            assert balance.elements[chosen].in_flight == min(balance.elements[endpoint].in_flight for endpoint in able)
    for one in flying:
        one.close()
    assert all(element.in_flight == 0 for element in balance.elements.values())

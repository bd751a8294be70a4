"""Totals over workers that come and go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.coordinator import departed
from workers.coordinator.worker_registry import Registry
from workers.messages.from_worker import Heartbeat, Register
from workers.messages.parts import Role, WorkerStatus

EVENTS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["beat", "leave", "come"]), st.integers(1, 9)), max_size=40)


@given(events=EVENTS)
def test_totals_are_what_all_have_counted_whoever_is_here(events: list[tuple[int, str, int]]) -> None:
    """Each process counts on while nobody hears it; what it has at the moment goes with it."""
    registry, counted, waiting, here = Registry(1.0, 9.0, 9.0), [0] * 4, [0] * 4, set[int]()
    told = [0] * 4
    for number, what, more in events:
        peer = bytes([number])
        if what == "come":
            registry.register(peer, Register(Role.rollout if number else Role.reward, "node", 1), 0.0)
            here.add(number)
        elif what == "leave":
            registry.remove(peer)
            here.discard(number)
            waiting[number] = 0
            counted[number] += more
        elif number in here:
            counted[number] += more
            told[number], waiting[number] = counted[number], more
            registry.beat(registry.workers[peer], Heartbeat(status=WorkerStatus(
                num_updates=told[number], idle_s=told[number] / 4, rewards_waiting=more, num_running=more, judge_error="no answer")))
        total = registry.totals()
        assert (total.num_updates, total.rewards_waiting, total.num_running) == (sum(told), sum(waiting), sum(waiting))
        assert total.idle_s == pytest.approx(sum(told) / 4)
        assert what != "come" or registry.workers[peer].status.num_updates == told[number], "until it tells another"


def test_of_workers_that_left_long_ago_only_what_they_counted_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departed, "REMEMBERED", 2)
    gone = departed.Departed()
    for number in range(5):
        gone.left(bytes([number]), WorkerStatus(num_updates=number))
    assert gone.totals([]).num_updates == 10
    assert gone.back(bytes([4])).num_updates == 4 and gone.totals([]).num_updates == 6
    assert gone.back(bytes([0])) == WorkerStatus() and gone.totals([WorkerStatus(num_updates=1)]).num_updates == 7

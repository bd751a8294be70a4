"""The ledger on its own: leases, groups that are given back, workers that come back, and what a later incarnation makes of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group, make_partial
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.ledger import LOST_AFTER_S, Ledger
from workers.messages.parts import HeldLease, Purpose, Version

ONE, TWO = b"one", b"two"


def hold(group_id: str, attempt: int) -> HeldLease:
    return HeldLease(group_id, attempt, Purpose.training, Version(1, 0))


def adopt(ledger: Ledger, group_id: str, attempt: int, *, worker: bytes = ONE, admitted_at: int = 4, may_admit: bool = True) -> bool:
    return ledger.adopt(worker, hold(group_id, attempt), admitted_at, may_admit)


def states(ledger: Ledger) -> dict[str, list[int]]:
    """In which state each index is."""
    return {"running": sorted(lease.index for lease in ledger.running.values()),
            "parked": sorted(entry.index for entry in ledger.parked.values()), "finished": sorted(index_of(group_id) for group_id in ledger.finished),
            "retry": list(ledger.retry), "set_aside": sorted(ledger.set_aside)}


def test_a_parked_group_is_leased_first_with_its_partial_and_its_version() -> None:
    ledger = Ledger(max_attempts=2)
    ledger.lease(ONE, 3)
    ledger.lease(ONE, 4)
    ledger.fail("g0", 0, "failed")
    partial = make_partial("g1", 0)
    assert ledger.park(partial) and ledger.admitted == 1 and ledger.running_versions() == {4: 1}
    again = ledger.lease(TWO, 9)
    assert again == ("g1", 1, 1, 4, 0, partial), "as old as it was"
    assert ledger.lease(TWO, 9)[:5] == ("g0", 0, 1, 9, 1), "a failed one is admitted anew"
    assert ledger.lease(TWO, 9).group_id == "g2"


def test_parked_groups_are_leased_in_the_order_of_their_return() -> None:
    ledger = Ledger(max_attempts=2)
    for _ in range(3):
        ledger.lease(ONE, 0)
    for index in (2, 0, 1):
        ledger.park(make_partial(f"g{index}", 0))
    assert [ledger.lease(TWO, 1).group_id for _ in range(3)] == ["g2", "g0", "g1"]


def test_only_the_newest_attempt_can_finish_park_or_fail() -> None:
    ledger = Ledger(max_attempts=5)
    ledger.lease(ONE, 0)
    ledger.park(make_partial("g0", 0))
    ledger.lease(TWO, 0)
    assert not ledger.finish(make_group("g0", 0)) and not ledger.park(make_partial("g0", 0)) and not ledger.fail("g0", 0, "late")
    assert not ledger.finish(make_group("g0", 2)) and ledger.failures == {}
    assert ledger.finish(make_group("g0", 1)) and not ledger.finish(make_group("g0", 1)) and not ledger.park(make_partial("g0", 1))
    assert ledger.num_finished == 1


def test_a_lost_worker_costs_what_it_did_itself_and_no_more() -> None:
    ledger = Ledger(max_attempts=2)
    for _ in range(3):
        ledger.lease(ONE, 3)
    partial = make_partial("g0", 0, [3])
    ledger.park(partial)
    ledger.lease(TWO, 5)
    assert ledger.release(TWO) == 1 and states(ledger)["parked"] == [0], "what the first worker had generated is still good"
    assert ledger.release(ONE) == 2 and states(ledger)["retry"] == [1, 2] and ledger.admitted == 1
    assert ledger.lease(TWO, 7) == ("g0", 0, 2, 3, 0, partial)
    assert ledger.lease(TWO, 7) == ("g1", 1, 1, 7, 0, None), "no failure of the group, but a new admission"
    assert ledger.release(b"nobody") == 0


def test_a_failure_drops_the_partial() -> None:
    """It may be what the group fails of."""
    ledger = Ledger(max_attempts=3)
    ledger.lease(ONE, 3)
    ledger.park(make_partial("g0", 0))
    ledger.lease(ONE, 5)
    ledger.fail("g0", 1, "does not fit")
    assert ledger.lease(ONE, 6) == ("g0", 0, 2, 6, 1, None)


def test_a_rejected_group_is_over_and_its_place_free() -> None:
    ledger = Ledger(max_attempts=2)
    for _ in range(3):
        ledger.lease(ONE, 0)
    ledger.fail("g0", 0, "once")
    ledger.lease(ONE, 0)
    assert not ledger.reject("g0", 0) and not ledger.reject("g7", 0), "no running attempts"
    assert ledger.reject("g0", 1) and not ledger.reject("g0", 1) and not ledger.finish(make_group("g0", 1))
    assert ledger.num_rejected == 1 and ledger.admitted == 2 and not ledger.failures and states(ledger)["running"] == [1, 2]
    assert ledger.lease(ONE, 5)[:4] == ("g3", 3, 0, 5), "the next prompt, at the version of now"
    assert not adopt(ledger, "g0", 1) and not adopt(ledger, "g0", 9), "whoever still has it need not bring it"


def test_the_last_failure_sets_aside_and_fatal_ones_at_once() -> None:
    ledger = Ledger(max_attempts=2)
    ledger.lease(ONE, 0)
    ledger.lease(ONE, 0)
    ledger.fail("g0", 0, "once")
    ledger.fail("g1", 0, "too long", fatal=True)
    ledger.lease(ONE, 0)
    ledger.fail("g0", 1, "twice")
    assert ledger.set_aside == {0: "twice", 1: "too long"} and ledger.admitted == 0 and not ledger.retry and not ledger.failures


# -- leases that are lost on their way -----------------------------------------------------------------------------------

def test_a_lease_is_lost_when_it_is_left_out_for_long_enough_however_often_the_worker_beats() -> None:
    ledger = Ledger(max_attempts=2)
    for _ in range(2):
        ledger.lease(ONE, 0)
    ledger.lease(TWO, 0)
    both, first = {("g0", 0), ("g1", 0)}, {("g0", 0)}
    for now, held in [(0.0, first), (0.01, first), (0.02, first), (9.0, first), (9.5, both), (20.0, first), (20.0 + LOST_AFTER_S - 0.1, first)]:
        assert ledger.reconcile(ONE, held, 99, now, LOST_AFTER_S) == 0
    assert ledger.reconcile(ONE, first, 99, 20.0 + LOST_AFTER_S, LOST_AFTER_S) == 1
    assert states(ledger) == {"running": [0, 2], "parked": [], "finished": [], "retry": [1], "set_aside": []}
    assert ledger.reconcile(TWO, {("g2", 0)}, 99, 99.0, LOST_AFTER_S) == 0


def test_another_attempt_of_a_group_is_another_lease() -> None:
    ledger = Ledger(max_attempts=2)
    ledger.lease(ONE, 0)
    assert ledger.reconcile(ONE, {("g0", 7)}, 99, 5.0, 0) == 1


def test_a_lost_lease_keeps_its_partial() -> None:
    ledger = Ledger(max_attempts=2)
    ledger.lease(ONE, 2)
    ledger.park(make_partial("g0", 0))
    ledger.lease(ONE, 5)
    assert ledger.reconcile(ONE, set(), 99, 5.0, 0) == 1 and states(ledger)["parked"] == [0] and ledger.running_versions() == {2: 1}


# -- workers that come back ----------------------------------------------------------------------------------------------

def test_a_known_lease_stays_with_its_worker_and_with_no_other() -> None:
    ledger = Ledger(max_attempts=2, first_attempt=1000)
    ledger.lease(ONE, 2)
    ledger.reconcile(ONE, set(), 99, 5.0, LOST_AFTER_S)
    assert adopt(ledger, "g0", 1000, may_admit=False) and ledger.running["g0"].missed_since is None and ledger.running["g0"].admitted_at == 2
    assert not adopt(ledger, "g0", 1000, worker=TWO) and not adopt(ledger, "g0", 999) and not adopt(ledger, "g0", 1001)
    assert ledger.running.owner("g0", 1000) == ONE


def test_an_unknown_lease_is_admitted_and_the_prompts_before_it_are_made_up_for() -> None:
    ledger = Ledger(max_attempts=2, first_attempt=2000, next_index=2, num_consumed=2)
    assert adopt(ledger, "g4", 1003, admitted_at=1)
    assert ledger.running["g4"].admitted_at == 1 and ledger.admitted == 3 and ledger.next_index == 5 and list(ledger.retry) == [2, 3]
    assert adopt(ledger, "g3", 1000, worker=TWO) and list(ledger.retry) == [2], "whoever has it saves its being done anew"
    assert [ledger.lease(ONE, 1).prompt_index for _ in range(2)] == [2, 5]


def test_an_unknown_lease_needs_a_place() -> None:
    ledger = Ledger(max_attempts=2, next_index=2)
    ledger.retry[1] = b""
    assert not adopt(ledger, "g4", 1003, may_admit=False) and not adopt(ledger, "g1", 1003, may_admit=False)
    assert ledger.next_index == 2 and list(ledger.retry) == [1] and not ledger.running


def test_what_is_done_is_not_wanted_any_more() -> None:
    ledger = Ledger(max_attempts=1)
    for _ in range(4):
        ledger.lease(ONE, 0)
    ledger.lease(ONE, 0)
    ledger.finish(make_group("g0", 0))
    ledger.take(["g0"])
    ledger.consume(["g0"])
    ledger.finish(make_group("g1", 0))
    ledger.fail("g2", 0, "broken")
    ledger.park(make_partial("g3", 0))
    ledger.finish(make_group("g4", 0))
    ledger.take(["g4"])
    before = states(ledger)
    assert not any(adopt(ledger, f"g{index}", 0) for index in range(5))
    assert not any(adopt(ledger, f"g{index}", 5) for index in (0, 1, 2, 4)), "consumed, finished, set aside, in training"
    assert states(ledger) == before and ledger.admitted == 4


def test_an_older_attempt_is_not_wanted_so_that_no_number_is_used_twice() -> None:
    ledger = Ledger(max_attempts=9)
    ledger.lease(ONE, 0)
    ledger.release(ONE)
    ledger.lease(TWO, 0)
    ledger.release(TWO)
    assert not adopt(ledger, "g0", 0) and adopt(ledger, "g0", 1)
    ledger.release(ONE)
    assert ledger.lease(ONE, 0).attempt == 2


def test_whoever_went_on_from_the_parked_partial_may_come_back_with_more() -> None:
    ledger = Ledger(max_attempts=9)
    partial = make_partial("g0", 0)
    ledger.lease(ONE, 2)
    ledger.park(partial)
    ledger.lease(TWO, 5)
    ledger.release(TWO)
    assert not adopt(ledger, "g0", 0), "that is what is parked"
    assert adopt(ledger, "g0", 1, worker=TWO, admitted_at=5, may_admit=False), "it has had its place all the time"
    assert ledger.running["g0"].admitted_at == 2 and ledger.running["g0"].partial is partial and not ledger.parked
    assert ledger.lease(ONE, 6).group_id == "g1"


@pytest.mark.parametrize("group_id", ["", "g", "e1.0", "x3", "g-1", "g1.5", "g²"])
def test_anything_else_is_no_training_group(group_id: str) -> None:
    with pytest.raises(ValueError):
        index_of(group_id)


# -- attempts and batches ------------------------------------------------------------------------------------------------

@given(st.lists(st.tuples(st.sampled_from(["lease", "lease", "finish", "reject", "fail", "park", "release", "adopt", "restart"]), st.integers(0, 99)),
                min_size=20, max_size=100))
@settings(max_examples=300, deadline=None)
def test_no_attempt_of_a_group_is_ever_leased_twice(events: list[tuple[str, int]]) -> None:
    """Through incarnations, which know only what runs, and whatever workers present."""
    epoch, ledger, leased, rejected = 1, Ledger(3, 1000), list[tuple[str, int]](), list[int]()
    for name, number in events:
        running = sorted(ledger.running)
        group_id = running[number % len(running)] if running else None
        if name == "lease":
            granted = ledger.lease(ONE, 0)
            assert (granted.group_id, granted.attempt) not in leased
            leased.append((granted.group_id, granted.attempt))
        elif name == "release":
            ledger.release(ONE)
        elif name == "adopt" and leased:
            ledger.adopt(ONE, hold(*leased[number % len(leased)]), 0, True)
        elif name == "restart":
            epoch += 1
            old, ledger = ledger, Ledger(3, epoch * 1000, ledger.next_index, ledger.num_consumed, ledger.num_finished)
            ledger.running, ledger.parked, ledger.finished, ledger.retry = old.running, old.parked, old.finished, old.retry
            ledger.set_aside, ledger.failures = old.set_aside, old.failures
            ledger.attempts = {lease.index: lease.attempt for lease in old.running.values()}
        elif group_id is not None:
            attempt = ledger.running[group_id].attempt
            match name:
                case "finish":
                    assert ledger.finish(make_group(group_id, attempt))
                case "reject":
                    assert ledger.reject(group_id, attempt)
                    rejected.append(index_of(group_id))
                case "fail":
                    assert ledger.fail(group_id, attempt, "failed")
                case "park":
                    assert ledger.park(make_partial(group_id, attempt))
        known = sorted([*rejected, *(index for part in states(ledger).values() for index in part)])
        assert known == list(range(ledger.next_index)), "every index is in one state"


def test_a_batch_that_is_given_up_is_as_if_it_had_never_been_taken() -> None:
    ledger = Ledger(max_attempts=2)
    for _ in range(3):
        ledger.lease(ONE, 7)
    for index in (2, 0, 1):
        ledger.finish(make_group(f"g{index}", 0))
    before = ledger.waiting_to_be_consumed()
    ledger.take(["g1"])
    assert [group.group_id for group in ledger.take(["g0", "g2"])] == ["g0", "g2"]
    assert (ledger.num_consumed, ledger.num_taken, ledger.admitted) == (0, 3, 3)
    with pytest.raises(KeyError):
        ledger.take(["g0"])
    ledger.return_to_buffer()
    assert sorted(ledger.waiting_to_be_consumed()) == sorted(before) and (ledger.num_consumed, ledger.num_taken, ledger.admitted) == (0, 0, 3)
    assert not adopt(ledger, "g0", 5) and not ledger.finish(make_group("g0", 0))
    with pytest.raises(KeyError):
        ledger.consume(["g0"])
    assert [group.group_id for group in ledger.take(["g0", "g2"])] == ["g0", "g2"]
    ledger.consume(["g0", "g2"])
    assert (ledger.num_consumed, ledger.num_taken, ledger.admitted) == (2, 2, 3)
    ledger.return_to_buffer()
    assert [group.group_id for group in ledger.waiting_to_be_consumed()] == ["g1"], "what is consumed stays so"

"""Algorithm 1: a slow reading of the paper as reference, and what must hold for any lengths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.trainer.batch.packing import balance, pack


def slow_pack(lengths: list[int], capacity: int, minimum: int) -> list[list[int]]:
    """The algorithm as written, searching all micro-batches for every item."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        fitting = [b for b in range(len(bins)) if rooms[b] >= lengths[index]]
        if len(bins) < minimum or not fitting:
            bins.append([index])
            rooms.append(capacity - lengths[index])
        else:
            best = min(fitting, key=lambda b: (len(bins[b]), -rooms[b], b))
            bins[best].append(index)
            rooms[best] -= lengths[index]
    return bins


CASES = st.tuples(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120), st.integers(1, 40))


def check(lengths: list[int], capacity: int, packed: list[list[int]]) -> None:
    assert sorted(index for items in packed for index in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[index] for index in items) <= capacity for items in packed)


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_it_is_algorithm_1_wherever_that_needs_no_more(case: tuple[list[int], int, int]) -> None:
    lengths, capacity, minimum = case
    packed, slow, fewest = pack(lengths, capacity, minimum), slow_pack(lengths, capacity, minimum), slow_pack(lengths, capacity, 1)
    check(lengths, capacity, packed)
    if len(slow) <= max(minimum, len(fewest)):
        assert packed == slow
    else:
        assert len(packed) == max(minimum, len(fewest))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(1, 50), max_size=40), min_size=1, max_size=4), st.integers(50, 120))
def test_copies_agree_on_the_largest_count(copies: list[list[int]], capacity: int) -> None:
    number = max(len(pack(lengths, capacity)) for lengths in copies)
    for lengths in copies:
        packed = pack(lengths, capacity, number)
        check(lengths, capacity, packed)
        assert len(packed) == min(number, len(lengths))


@pytest.mark.parametrize(("lengths", "capacity", "fewest", "wanted", "spread"), [
    ([6, 6, 4, 4, 4], 12, 2, 2, 3),
    ([50, 48, 45, 45, 45, 42, 38, 38, 37, 36, 35, 33, 33, 32, 30, 28, 27], 100, 7, 8, 9),
])
def test_spreading_evenly_may_leave_no_room(lengths: list[int], capacity: int, fewest: int, wanted: int, spread: int) -> None:
    assert (len(slow_pack(lengths, capacity, 1)), len(slow_pack(lengths, capacity, wanted))) == (fewest, spread)
    packed = pack(lengths, capacity, wanted)
    check(lengths, capacity, packed)
    assert len(packed) == wanted


def test_longest_first_balances_counts() -> None:
    assert pack([4, 1, 3, 2], capacity=6, min_microbatches=2) == [[0, 1], [2, 3]]


def test_too_long_names_length_budget_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"item 1 has 300 tokens.*budget of 256.*trainer.microbatch_tokens to 300"):
        pack([10, 300], 256)
    with pytest.raises(ValueError, match="at least 1"):
        pack([0], 256)


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_balanced_microbatches_differ_by_an_item(case: tuple[list[int], int, int]) -> None:
    """Where there is room for it: then the fullest has at most the shortest of its items more than the emptiest."""
    lengths, capacity, number = case
    packed = balance(lengths, capacity, number)
    check(lengths, capacity, packed)
    assert len(packed) >= min(number, len(lengths))
    tokens = [sum(lengths[index] for index in items) for items in packed]
    if packed != pack(lengths, capacity, number) and packed:
        fullest = max(range(len(packed)), key=tokens.__getitem__)
        assert tokens[fullest] - min(tokens) <= min(lengths[index] for index in packed[fullest])
    if lengths and max(lengths) + sum(lengths) / number <= capacity:
        assert len(packed) == min(number, len(lengths))

"""Algorithm 1: a slow reading of the paper as reference, and what must hold for any lengths."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.trainer.packing import pack


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


CASES = st.tuples(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120), st.integers(1, 8))


@settings(max_examples=200, deadline=None)
@given(CASES)
def test_properties(case: tuple[list[int], int, int]) -> None:
    lengths, capacity, minimum = case
    packed = pack(lengths, capacity, minimum)
    assert sorted(index for items in packed for index in items) == list(range(len(lengths)))
    assert all(items and sum(lengths[index] for index in items) <= capacity for items in packed)
    assert len(packed) >= min(minimum, len(lengths))
    for items in packed:
        assert [lengths[index] for index in items] == sorted((lengths[index] for index in items), reverse=True)
    assert packed == slow_pack(lengths, capacity, minimum)


def test_longest_first_balances_counts() -> None:
    assert pack([4, 1, 3, 2], capacity=6, min_microbatches=2) == [[0, 1], [2, 3]]


def test_too_long_names_length_budget_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"item 1 has 300 tokens.*budget of 256.*trainer.microbatch_tokens to 300"):
        pack([10, 300], 256)
    with pytest.raises(ValueError, match="at least 1"):
        pack([0], 256)


def test_8192_sequences_are_quick() -> None:
    generator = random.Random(0)
    lengths = [min(28_000, int(generator.lognormvariate(8, 1)) + 1) for _ in range(8192)]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        pack(lengths, 32_768)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2  # about 0.03 s on an idle core

"""Dividing a batch into minibatches and among copies: everything once, equal numbers, balanced tokens, drawn by the seed."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.coordinator.training.batch_split import divide_batch

LENGTHS = st.lists(st.integers(1, 100_000), max_size=40)
Divided = list[list[list[int]]]


def sums(lengths: list[int], divided: Divided) -> list[list[int]]:
    """Tokens by minibatch and copy."""
    return [[sum(lengths[index] for index in copy) for copy in copies] for copies in divided]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 6), st.integers(0, 9))
def test_every_group_once_in_equal_minibatches(lengths: list[int], minibatches: int, copies: int, seed: int) -> None:
    divided = divide_batch(lengths, minibatches, copies, [seed, 3])
    assert [len(parts) for parts in divided] == [copies] * minibatches
    assert sorted(index for parts in divided for copy in parts for index in copy) == list(range(len(lengths)))
    assert all(copy == sorted(copy) for parts in divided for copy in parts)
    counts = [sum(map(len, parts)) for parts in divided]
    assert max(counts) - min(counts) <= (1 if len(lengths) % minibatches else 0)
    for parts, count in zip(divided, counts, strict=True):
        assert sum(bool(copy) for copy in parts) == min(copies, count), "no copy is idle without need"


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.data())
def test_tokens_are_balanced(minibatches: int, copies: int, seed: int, draw: st.DataObject) -> None:
    strata = draw.draw(st.integers(0, 8))
    lengths = draw.draw(st.lists(st.integers(1, 100_000), min_size=strata * minibatches, max_size=strata * minibatches))
    divided = divide_batch(lengths, minibatches, copies, [seed])
    cells = sums(lengths, divided)
    totals = [sum(row) for row in cells]
    assert max(totals) - min(totals) <= max(lengths, default=0) - min(lengths, default=0)
    for row, parts in zip(cells, divided, strict=True):
        assert max(row) - min(row) <= max((lengths[index] for copy in parts for index in copy), default=0)


def smallest_largest(lengths: list[int], number: int) -> int:
    """The best that any division into `number` shares can do."""
    best = sum(lengths)
    for shares in itertools.product(range(number), repeat=len(lengths)):
        tokens = [0] * number
        for share, length in zip(shares, lengths, strict=True):
            tokens[share] += length
        best = min(best, max(tokens))
    return best


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_no_copy_has_a_third_more_than_it_must(lengths: list[int], copies: int) -> None:
    (cells,) = sums(lengths, divide_batch(lengths, 1, copies, [0]))
    assert 3 * max(cells) <= 4 * smallest_largest(lengths, copies)


def test_a_batch_of_the_papers_size_is_even() -> None:
    """512 groups of 16 answers, 4 minibatches, 8 copies: what all wait for is within 1% of the mean, over the batch as well."""
    for step in range(5):
        draw = random.Random(step)
        lengths = [min(16 * 28_672, int(draw.lognormvariate(11.5, 0.6))) for _ in range(512)]
        cells = sums(lengths, divide_batch(lengths, 4, 8, [1, step]))
        mean = sum(lengths) / 32
        assert max(max(row) for row in cells) < 1.01 * mean
        assert max(sum(row[copy] for row in cells) for copy in range(8)) < 4.02 * mean


def companions(divided: Divided) -> set[frozenset[int]]:
    return {frozenset(index for copy in parts for index in copy) for parts in divided}


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_the_seed_decides_who_meets_whom(first: int, second: int) -> None:
    draw = random.Random(first)
    lengths = [draw.randint(900, 1100) for _ in range(64)]
    assert divide_batch(lengths, 4, 2, [first]) == divide_batch(lengths, 4, 2, [first])
    assert (companions(divide_batch(lengths, 4, 2, [7, first])) == companions(divide_batch(lengths, 4, 2, [7, second]))) == (first == second)


def test_it_is_the_same_in_every_process_and_light() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 5000) for _ in range(24)]
    code = ("import sys; from workers.coordinator.training.batch_split import divide_batch; "
            f"print(divide_batch({lengths}, 3, 2, [4, 5])); print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[5], capture_output=True, text=True, check=True,
                          env={"PYTHONHASHSEED": "7"}, timeout=60)
    assert done.stdout.splitlines() == [str(divide_batch(lengths, 3, 2, [4, 5])), "False"]

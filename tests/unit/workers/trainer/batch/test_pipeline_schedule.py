"""The time that 1F1B takes: known cases, and what must hold for any micro-batches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.trainer.batch.pipeline_schedule import BACKWARD, passes_in_order, span

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=20)


@given(st.integers(1, 20), st.integers(1, 8))
def test_equal_microbatches_wait_as_the_paper_says(number: int, stages: int) -> None:
    """(p - 1) / m of the work (arXiv 2104.04473, section 2.2.1)."""
    work = number * (1 + BACKWARD)
    assert span([1] * number, stages) == work + (stages - 1) * (1 + BACKWARD)


@given(st.integers(1, 5), st.integers(2, 6), st.integers(2, 4))
def test_interleaved_stages_wait_for_a_piece_instead(rounds: int, stages: int, pieces: int) -> None:
    """(p - 1) / (m v) of the work (section 2.2.2)."""
    number = rounds * stages
    assert span([1] * number, stages, pieces) == pytest.approx((number + (stages - 1) / pieces) * (1 + BACKWARD))


def test_the_order_is_megatrons() -> None:
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for stages, pieces, number in ((2, 2, 4), (4, 3, 8), (3, 2, 3)):
        assert passes_in_order(number, stages, pieces) == schedules.get_schedule_table(number, pieces, stages)


def test_two_stages_by_hand() -> None:
    """Stage 0: F0 at 0, F1 1-4, B0 when stage 1 has done F0, B0 (1-2, 2-4): 4-6, B1 after stage 1's F1, B1 (4-7, 7-13): 13-19."""
    assert span([1, 3], 2) == 19


@settings(max_examples=200, deadline=None)
@given(COSTS, st.integers(1, 6), st.integers(2, 5))
def test_it_is_between_the_work_and_the_work_one_by_one(costs: list[int], stages: int, times: int) -> None:
    work = sum(costs) * (1 + BACKWARD)
    found = span(costs, stages)
    assert work + (stages - 1) * (costs[0] + BACKWARD * costs[-1]) <= found <= work * stages
    assert span([times * cost for cost in costs], stages) == pytest.approx(times * found)
    assert span(costs, stages + 1) >= found
    assert span(costs, 1) == work

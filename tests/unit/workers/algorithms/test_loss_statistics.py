"""How far policies lie apart: sums that add up over micro-batches, and the percentile that is made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.algorithms.loss_statistics import DISTANCES, divergence_sums, gap_percentile, merge_stats


@given(gaps=st.lists(st.floats(-15, 15, width=32), min_size=1, max_size=300), masked=st.integers(1, 20), parts=st.integers(1, 4))
def test_the_percentile_is_between_the_distances_around_it(gaps: list[float], masked: int, parts: int) -> None:
    before = torch.tensor([*gaps, *[99.0] * masked])
    mask = torch.tensor([True] * len(gaps) + [False] * masked)
    stats = merge_stats([divergence_sums(one, torch.zeros_like(one), kept)
                         for one, kept in zip(before.chunk(parts), mask.chunk(parts), strict=True)])
    assert stats["gap_tokens"] == len(gaps) and stats["gap_proximal_behavior"] == pytest.approx(np.abs(gaps).sum(), rel=1e-4, abs=1e-6)
    exact = float(np.percentile(np.abs(np.array(gaps, np.float32)), 99, method="higher"))
    found = gap_percentile(stats, 0.99)
    if exact <= DISTANCES[0]:
        assert found == 0
    else:
        assert exact / 2**0.5 <= found * 1.001 and found <= exact * 2**0.5 * 1.001


def test_without_tokens_there_is_no_distance() -> None:
    nothing = torch.zeros(1)
    assert gap_percentile(merge_stats([divergence_sums(nothing, nothing, torch.tensor([False]))]), 0.99) == 0

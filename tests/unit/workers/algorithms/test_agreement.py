"""The gap between the engine's log-probs and the trainer's: sums that add up, and count nothing but what is compared."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.algorithms.agreement import Agreement, agreement
from workers.algorithms.loss_statistics import merge_stats

LOGPROB = st.floats(-20, 0, width=32)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.booleans()), min_size=1, max_size=30)


@given(tokens=TOKENS, cut=st.integers(0, 30))
def test_statistics_add_up_over_micro_batches(tokens: list[tuple[float, float, bool]], cut: int) -> None:
    parts = [part for part in (tokens[:cut], tokens[cut:]) if part]
    merged = merge_stats([agreement(*(torch.tensor(column) for column in zip(*part, strict=True))) for part in parts])
    gaps = [abs(np.float32(trainer) - np.float32(engine)) for trainer, engine, compared in tokens if compared]
    found = Agreement.of(merged | {"tokens": float(len(tokens))})
    assert (found.num_tokens, found.share) == (len(gaps), len(gaps) / len(tokens))
    assert found.mean == pytest.approx(np.mean(gaps) if gaps else 0.0, rel=1e-5, abs=1e-6)
    assert found.max == (max(gaps) if gaps else 0.0)
    assert set(found.metrics()) == {"num_tokens_compared", *(("logprob_gap_mean", "logprob_gap_max") if gaps else ())}


def test_what_is_not_compared_may_be_anything() -> None:
    stats = agreement(torch.tensor([-1.0, float("nan"), -3.0]), torch.tensor([-1.5, -2.0, float("inf")]), torch.tensor([True, False, False]))
    assert {name: float(value) for name, value in stats.items()} == {"compared": 1, "gap": 0.5, "max_gap": 0.5}

"""Advantages: against plain numpy, and what must hold for any rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.algorithms.advantages import EPSILON, batch_norm, group_norm

REWARDS = st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=1, max_size=5)


def test_group_norm_against_numpy() -> None:
    rewards = np.random.default_rng(0).normal(size=(6, 5))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + EPSILON)
    assert np.allclose(group_norm(torch.from_numpy(rewards)).numpy(), expected, rtol=1e-12)


def test_batch_norm_against_numpy() -> None:
    rewards = np.random.default_rng(1).normal(size=(6, 5))
    expected = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
    assert np.allclose(batch_norm(torch.from_numpy(rewards)).numpy(), expected, rtol=1e-12)


def test_no_spread_gives_exact_zeros() -> None:
    rewards = torch.tensor([[0.1, 0.1, 0.1], [-5.0, 5.0, 5.0]])
    advantages = group_norm(rewards)
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert (advantages[1] != 0).all()
    assert (batch_norm(torch.full((3, 3), 0.1)) == 0).all()


@settings(max_examples=50, deadline=None)
@given(REWARDS)
def test_group_norm_sums_to_zero_and_keeps_order(values: list[list[float]]) -> None:
    rewards = torch.tensor(values, dtype=torch.float64)
    advantages = group_norm(rewards)
    assert torch.allclose(advantages.sum(-1), torch.zeros(len(values), dtype=torch.float64), atol=1e-6)
    assert torch.allclose(group_norm(rewards.flip(-1)).flip(-1), advantages, atol=1e-9)
    better = rewards[:, :, None] > rewards[:, None, :]
    assert not (better & (advantages[:, :, None] < advantages[:, None, :])).any()


@pytest.mark.parametrize(("rewards", "text"), [
    (torch.zeros(3, 0), "at least one response"),
    (torch.tensor([[1, 2]]), "floating point"),
    (torch.tensor([[1.0, float("nan")]]), "finite"),
])
def test_bad_rewards(rewards: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        group_norm(rewards)

"""Advantages: against plain numpy, and what must hold for any rewards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.algorithms.advantages import EPSILON, batch_norm, group_center, group_norm, leave_one_out, moments, whiten

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


def test_groups_are_centred_or_compared_with_the_others() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0], [0.1, 0.1, 0.1, 0.1]])
    assert group_center(rewards).tolist() == [[0.0, -1.0, -1.0, 2.0], [0.0] * 4]
    assert leave_one_out(rewards).flatten().tolist() == pytest.approx([0.0, -4 / 3, -4 / 3, 8 / 3, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="no other one to compare it with"):
        leave_one_out(torch.ones(3, 1))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.integers(0, 20))
def test_moments_are_those_of_all_parts(values: list[float], cut: int) -> None:
    whole = torch.tensor(values, dtype=torch.float64)
    parts = [whole[:cut], whole[cut:]]
    mean, variance = moments(whole)
    assert (mean, variance) == pytest.approx((np.mean(values), np.var(values)), abs=1e-12)
    # Each part as the other one's share in a sum over both.
    sums = iter([torch.tensor([len(parts[1]), parts[1].sum()], dtype=torch.float64), (parts[1] - mean).square().sum()[None]])
    found = whiten(parts[0], lambda own: own + next(sums))
    assert torch.allclose(found, whiten(whole)[:cut], atol=1e-9)


def test_nothing_has_no_moments() -> None:
    assert moments(torch.zeros(0)) == (0.0, 0.0) and whiten(torch.zeros(0)).tolist() == [] and whiten(torch.ones(3)).tolist() == [0.0] * 3

"""GAE and the value loss against loops over tokens, straight from the definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.algorithms.values import clipped_value_loss, discounted_sums, gae, outcome_rewards, rewards_to_go

NUMBERS = st.floats(-10, 10)
RESPONSES = st.lists(st.tuples(NUMBERS, st.lists(NUMBERS, max_size=40)), max_size=6)
FACTORS = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


def by_loop(reward: float, values: list[float], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """Advantages and returns of one response, from its last action to its first."""
    advantages: list[float] = []
    following, advantage = 0.0, 0.0
    for place, value in enumerate(reversed(values)):
        delta = (reward if place == 0 else 0.0) + gamma * following - value
        advantage = delta + gamma * lam * advantage
        advantages.insert(0, advantage)
        following = value
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


@settings(max_examples=200, deadline=None)
@given(RESPONSES, FACTORS, FACTORS)
def test_gae_against_a_loop(responses: list[tuple[float, list[float]]], gamma: float, lam: float) -> None:
    rewards = torch.tensor([reward for reward, _ in responses], dtype=torch.float64)
    values = torch.tensor([value for _, values in responses for value in values], dtype=torch.float64)
    lengths = torch.tensor([len(values) for _, values in responses], dtype=torch.int64)
    found = gae(outcome_rewards(rewards, lengths), values, lengths, gamma, lam)
    expected = [by_loop(reward, values, gamma, lam) for reward, values in responses]
    for number in range(2):
        assert found[number].tolist() == pytest.approx([value for pair in expected for value in pair[number]], rel=1e-9, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=40), NUMBERS)
def test_without_discount_returns_are_rewards_and_values_telescope(values: list[float], reward: float) -> None:
    value = torch.tensor(values, dtype=torch.float64)
    lengths = torch.tensor([len(values)])
    advantages, returns = gae(outcome_rewards(torch.tensor([reward], dtype=torch.float64), lengths), value, lengths, 1.0, 1.0)
    assert torch.allclose(returns, torch.full_like(returns, reward), atol=1e-9)
    assert torch.allclose(advantages, reward - value, atol=1e-9)


def test_right_values_have_no_advantage() -> None:
    values = 0.9 ** torch.arange(4, -1, -1, dtype=torch.float64) * 3
    advantages, returns = gae(outcome_rewards(torch.tensor([3.0]), torch.tensor([5])), values, torch.tensor([5]), 0.9, 0.7)
    assert torch.allclose(advantages, torch.zeros(5, dtype=torch.float64), atol=1e-12) and torch.allclose(returns, values)


def test_rewards_to_go() -> None:
    lengths = torch.tensor([2, 0, 3])
    rewards = outcome_rewards(torch.tensor([1.0, 5.0, 2.0]), lengths)
    assert rewards.tolist() == [0, 1, 0, 0, 2], "a response without actions has none that its reward could be of"
    assert rewards_to_go(rewards - 0.5, lengths, 1.0).tolist() == [0.0, 0.5, 0.5, 1.0, 1.5]
    assert rewards_to_go(rewards, lengths, 0.5).tolist() == [0.5, 1.0, 0.5, 1.0, 2.0]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 3 numbers for 2 actions of 1 responses"):
        gae(torch.zeros(3), torch.zeros(3), torch.tensor([2]), 1.0, 1.0)
    with pytest.raises(ValueError, match="3 values are for 2 rewards of actions"):
        gae(torch.zeros(2), torch.zeros(3), torch.tensor([3]), 1.0, 1.0)
    with pytest.raises(ValueError, match="2 rewards are for 1 responses"):
        outcome_rewards(torch.zeros(2), torch.tensor([3]))


def test_long_sequences_are_summed_exactly() -> None:
    terms = torch.randn(30_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    following = torch.arange(len(terms) - 1, -1, -1)
    assert torch.allclose(discounted_sums(terms, following, 1.0), terms.flip(0).cumsum(0).flip(0), atol=1e-9)


TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=20)


@settings(max_examples=200, deadline=None)
@given(TOKENS, st.sampled_from([0.0, 0.2, 1.0]))
def test_value_loss_against_a_loop(tokens: list[tuple[float, float, float, bool]], clip: float) -> None:
    expected = 0.0
    for value, old, target, valid in tokens:
        clipped = min(max(value, old - clip), old + clip) if clip else value
        expected += 0.5 * max((value - target) ** 2, (clipped - target) ** 2) if valid else 0.0
    columns = [torch.tensor(column, dtype=torch.float64) for column in list(zip(*tokens, strict=True))[:3]]
    loss, stats = clipped_value_loss(*columns, torch.tensor([token[3] for token in tokens]), normalizer=7.0, clip=clip)
    assert float(loss) == pytest.approx(expected / 7.0, rel=1e-12, abs=1e-12)
    assert float(stats["loss"]) == float(loss)


def test_a_value_is_moved_no_further_than_the_clip() -> None:
    values = torch.tensor([0.0, 0.9, 1.1, -0.5, 6.0], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([3.0, 3.0, 3.0, 3.0, 3.0], dtype=torch.float64)
    loss, _ = clipped_value_loss(values, torch.zeros(5, dtype=torch.float64), returns, torch.ones(5, dtype=torch.bool), normalizer=1.0, clip=1.0)
    loss.backward()
    # Beyond the clip a value that has gone towards the return stays; one that has gone away from it comes back.
    assert values.grad is not None and values.grad.tolist() == pytest.approx([-3.0, -2.1, 0.0, -3.5, 3.0])


def test_masked_values_contribute_exactly_zero() -> None:
    poison = torch.tensor([float("nan"), float("inf"), 1e30])
    values = poison.clone().requires_grad_()
    loss, _ = clipped_value_loss(values, poison, poison, torch.zeros(3, dtype=torch.bool), normalizer=1.0, clip=1.0)
    loss.backward()
    assert float(loss) == 0.0 and values.grad is not None and values.grad.tolist() == [0.0] * 3

"""The references themselves: what the papers say in words, and each stated gradient against finite differences of its value."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles import advantages, policy, reductions

REWARDS = st.lists(st.floats(-5, 5), min_size=2, max_size=6)
LOGPROBS = st.floats(-8, -0.01)
ADVANTAGES = st.floats(0.1, 3) | st.floats(-3, -0.1)
STEP = 1e-6


def slope(value: Callable[[float], float], at: float) -> float:
    return (value(at + STEP) - value(at - STEP)) / (2 * STEP)


@given(rewards=REWARDS, eps=st.floats(1e-6, 1e-3))
def test_grpo_has_mean_zero_and_spread_one(rewards: list[float], eps: float) -> None:
    [row] = advantages.grpo([rewards], eps)
    spread = advantages.spread_of(rewards)
    assert abs(math.fsum(row)) <= 1e-6
    assert advantages.spread_of(row) == pytest.approx(spread / (spread + eps) if max(rewards) > min(rewards) else 0, abs=1e-7)


@given(rewards=REWARDS)
def test_leave_one_out_is_the_centred_reward_times_n_over_n_less_one(rewards: list[float]) -> None:
    [[*left_out], [*centred]] = advantages.rloo([rewards]), advantages.dr_grpo([rewards])
    number = len(rewards)
    for one, other in zip(left_out[0], centred[0], strict=True):
        assert one == pytest.approx(number / (number - 1) * other, abs=1e-9)


def test_worked_examples() -> None:
    assert advantages.grpo([[1, 0, 0, 1]], 0) == [[1, -1, -1, 1]]
    assert advantages.rloo([[1, 0, 0]]) == [[1, -0.5, -0.5]]
    assert advantages.batch_norm([[2, 0], [0, 2]], 0) == [[1, -1], [-1, 1]]
    masks = [[True, False, True], [True, False]]
    assert advantages.reinforce_pp([3, 0], [[1, 9, 1], [0, 5]], masks, 1, 0) == advantages.normalized_actions([[1, 9, 2], [0, 9]], masks, 0)
    assert advantages.normalized_actions([[1, 9, 2], [0, 9]], masks, 0)[0] == pytest.approx([0, 0, math.sqrt(1.5)])
    assert policy.sequence_ratio([0, 9, math.log(4)], [0, 0, 0], [True, False, True]) == pytest.approx(2)
    assert policy.m2po([[2, 1, -3, 9]], [[1, 1, 1, 1]], [[True, True, True, False]], 1) == [[False, True, True, False]]
    assert policy.m2po([[2, 1, -3]], [[1, 1, -1]], [[True, True, True]], 0.5) == [[False, False, False]]
    assert reductions.token_mean([[1, 2], [6]], [[True, True], [True]]) == 3
    assert reductions.sequence_mean([[1, 2], [6]], [[True, True], [True]]) == 3.75
    assert reductions.fixed_length([[1, 2], [6]], [[True, True], [True]], 3) == 1.5
    assert reductions.entropy([0.0, 0.0]) == pytest.approx(math.log(2))


@given(reward=st.floats(-3, 3), values=st.lists(st.floats(-2, 2), min_size=1, max_size=6), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_obeys_its_recursion(reward: float, values: list[float], gamma: float, lam: float) -> None:
    """A_t = delta_t + gamma lambda A_{t+1}; with gamma = lambda = 1 it is the reward less the value."""
    rewards, mask = [0.0] * (len(values) - 1) + [reward], [True] * len(values)
    [[row], [targets]] = advantages.gae([rewards], [values], [mask], gamma, lam)
    for place, value in enumerate(values):
        last = place + 1 == len(values)
        delta = rewards[place] + (0 if last else gamma * values[place + 1]) - value
        assert row[place] == pytest.approx(delta + (0 if last else gamma * lam * row[place + 1]), abs=1e-9)
        assert targets[place] == row[place] + value
    [[monte_carlo], _] = advantages.gae([rewards], [values], [mask], 1, 1)
    assert monte_carlo == pytest.approx([reward - value for value in values], abs=1e-9)


@given(ratio=st.floats(0.05, 6), advantage=ADVANTAGES)
def test_stated_gradients_of_surrogates(ratio: float, advantage: float) -> None:
    for surrogate in (lambda r: policy.ppo(r, advantage, 0.2, 0.28), lambda r: policy.dual_clip(r, advantage, 0.2, 0.28, 3),
                      lambda r: policy.sapo(r, advantage, 1.0, 1.05)):
        if min(abs(ratio - kink) for kink in (0.8, 1.28, 3.0)) > 2 * STEP:
            assert surrogate(ratio)[1] == pytest.approx(slope(lambda r: surrogate(r)[0], ratio), rel=1e-5, abs=1e-8)  # noqa: B023


@given(current=LOGPROBS, reference=LOGPROBS)
def test_stated_gradients_of_divergences(current: float, reference: float) -> None:
    for estimate in (reductions.k1, reductions.k2, reductions.k3):
        assert estimate(current, reference)[1] == pytest.approx(slope(lambda x: estimate(x, reference)[0], current), rel=1e-4, abs=1e-4)  # noqa: B023
    assert reductions.k2(current, reference)[0] >= 0
    assert reductions.k3(current, reference)[0] >= 0


@given(data=st.data(), size=st.integers(1, 5))
def test_stated_gradient_of_the_sequence_ratio(data: st.DataObject, size: int) -> None:
    current, old = (data.draw(st.lists(LOGPROBS, min_size=size, max_size=size)) for _ in range(2))
    mask = data.draw(st.lists(st.booleans(), min_size=size, max_size=size).filter(any))
    ratio = policy.sequence_ratio(current, old, mask)
    found = policy.gspo_gradient(ratio, 1.0, mask)
    for token in range(size):
        moved = slope(lambda x: policy.sequence_ratio([*current[:token], x, *current[token + 1:]], old, mask), current[token])  # noqa: B023
        assert found[token] == pytest.approx(moved, rel=1e-4, abs=1e-6)


def test_estimates_of_the_divergence_have_its_mean() -> None:
    """Over all tokens of a distribution, k1 and k3 give KL(pi, pi_ref) exactly."""
    chances, others = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    divergence = math.fsum(p * math.log(p / q) for p, q in zip(chances, others, strict=True))
    for estimate in (reductions.k1, reductions.k3):
        assert math.fsum(p * estimate(math.log(p), math.log(q))[0] for p, q in zip(chances, others, strict=True)) == pytest.approx(divergence)

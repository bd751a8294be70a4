"""Decoupled PPO against an independent token-by-token reference in float64, and its invariants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.algorithms.losses import decoupled_ppo_loss, merge_stats, reference_kl, summarize


def make(seed: int, num: int = 24, spread: float = 0.4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num, generator=generator, dtype=torch.float64)

    base = -normal().abs() - 0.1
    return {
        "current_logprobs": base + spread * normal(),
        "proximal_logprobs": base + spread * normal(),
        "behavior_logprobs": base + spread * normal(),
        "advantages": normal(),
        "mask": torch.rand(num, generator=generator) > 0.3,
    }


def reference(case: dict[str, Any], normalizer: float, epsilon: float, cap: float, clamp: bool, decoupled: bool) -> float:
    """Eq. 5, one token at a time, in Python floats."""
    total = 0.0
    for cur, prox, behav, adv, valid in zip(*(case[name].tolist() for name in (
            "current_logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "mask")), strict=True):
        if not valid:
            continue
        if not decoupled:
            prox = behav
        weight = math.exp(prox) / math.exp(behav)
        if weight > cap:
            weight = cap if clamp else 0.0
        ratio = math.exp(cur) / math.exp(prox)
        total -= weight * min(ratio * adv, min(max(ratio, 1 - epsilon), 1 + epsilon) * adv)
    return total / normalizer


@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("cap", [1.2, 5.0])
def test_against_reference(clamp: bool, decoupled: bool, cap: float) -> None:
    for seed in range(10):
        case = make(seed)
        loss, _ = decoupled_ppo_loss(**case, normalizer=17.0, clip_epsilon=0.2, behavior_cap=cap, clamp=clamp, decoupled=decoupled)
        assert float(loss) == pytest.approx(reference(case, 17.0, 0.2, cap, clamp, decoupled), rel=1e-12, abs=1e-14)


def test_gradcheck() -> None:
    case = make(3)
    current = case.pop("current_logprobs").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: decoupled_ppo_loss(x, **case, normalizer=9.0, behavior_cap=1.5)[0], (current,), eps=1e-7, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_on_policy_all_objectives_are_the_policy_gradient(seed: int) -> None:
    case = make(seed, spread=0.0)
    case["proximal_logprobs"] = case["behavior_logprobs"] = case["current_logprobs"].clone()
    gradients = []
    for decoupled in (False, True):
        current = case["current_logprobs"].clone().requires_grad_()
        loss, _ = decoupled_ppo_loss(**{**case, "current_logprobs": current}, normalizer=5.0, decoupled=decoupled)
        gradients.extend(torch.autograd.grad(loss, current))
    policy_gradient = torch.where(case["mask"], -case["advantages"] / 5.0, 0.0)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.allclose(gradients[0], policy_gradient, rtol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_order_of_tokens_does_not_matter(seed: int) -> None:
    case = make(seed)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
    loss, stats = decoupled_ppo_loss(**case, normalizer=7.0)
    moved, moved_stats = decoupled_ppo_loss(**{name: value[order] for name, value in case.items()}, normalizer=7.0)
    assert float(loss) == pytest.approx(float(moved), rel=1e-12)
    assert {name: float(value) for name, value in stats.items()} == pytest.approx(
        {name: float(value) for name, value in moved_stats.items()}, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([float("nan"), float("inf"), -1e30, 1e30]))
def test_masked_tokens_contribute_exactly_zero(seed: int, poison: float) -> None:
    case = make(seed)
    spoiled = {name: value if name == "mask" else torch.where(case["mask"], value, poison) for name, value in case.items()}
    results = []
    for inputs in (case, spoiled):
        current = inputs["current_logprobs"].clone().requires_grad_()
        loss, stats = decoupled_ppo_loss(**{**inputs, "current_logprobs": current}, normalizer=7.0)
        loss.backward()
        assert current.grad is not None and (current.grad[~case["mask"]] == 0).all()
        results.append((loss.item(), current.grad, {name: float(value) for name, value in stats.items()}))
    assert results[0][0] == results[1][0] and results[0][2] == results[1][2]
    assert torch.equal(results[0][1], results[1][1])


def test_statistics_add_up_over_micro_batches() -> None:
    case = make(5, num=40)
    parts = [{name: value[a:b] for name, value in case.items()} for a, b in ((0, 7), (7, 30), (30, 40))]
    whole_loss, whole = decoupled_ppo_loss(**case, normalizer=30.0, behavior_cap=1.3)
    shares = [decoupled_ppo_loss(**part, normalizer=30.0, behavior_cap=1.3) for part in parts]
    assert sum(float(loss) for loss, _ in shares) == pytest.approx(float(whole_loss), rel=1e-12)
    assert merge_stats([stats for _, stats in shares]) == pytest.approx(merge_stats([whole]), rel=1e-12)


def test_metrics() -> None:
    current = torch.tensor([0.0, 0.5, -0.5, 9.0], dtype=torch.float64)
    proximal = torch.zeros(4, dtype=torch.float64)
    behavior = torch.tensor([0.0, -math.log(2.0), -math.log(8.0), 3.0], dtype=torch.float64)
    _, stats = decoupled_ppo_loss(current, proximal, behavior, torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64),
                                  torch.tensor([True, True, True, False]), normalizer=3.0, behavior_cap=5.0)
    metrics = summarize(merge_stats([stats]))
    assert metrics["behavior_weight_mean"] == pytest.approx(11 / 3)
    assert metrics["behavior_weight_max"] == pytest.approx(8)
    assert metrics["behavior_ess"] == pytest.approx(11**2 / (3 * 69))
    assert metrics["behavior_masked_share"] == pytest.approx(1 / 3)
    assert metrics["clip_share"] == pytest.approx(1 / 3)
    assert metrics["gap_current_proximal"] == pytest.approx(1 / 3)
    assert metrics["kl_proximal"] == pytest.approx(0.0)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_reference_kl_against_a_loop(seed: int) -> None:
    case = make(seed)
    expected = 0.0
    for current, reference_, valid in zip(*(case[name].tolist() for name in ("current_logprobs", "proximal_logprobs", "mask")), strict=True):
        expected += math.exp(reference_ - current) - (reference_ - current) - 1 if valid else 0.0
    value, stats = reference_kl(case["current_logprobs"], case["proximal_logprobs"], case["mask"], normalizer=5.0)
    assert float(value) == pytest.approx(expected / 5.0, rel=1e-9, abs=1e-12) and value >= 0
    assert summarize(merge_stats([decoupled_ppo_loss(**case, normalizer=1.0)[1] | stats]))["kl_reference"] == pytest.approx(
        expected / max(1, int(case["mask"].sum())), rel=1e-9, abs=1e-12)


def test_reference_kl_is_without_bias_and_its_gradient_is_right() -> None:
    """Over all tokens of a distribution, weighted by it, the estimate is the divergence."""
    generator = torch.Generator().manual_seed(0)
    own, other = (torch.log_softmax(torch.randn(50, generator=generator, dtype=torch.float64), 0) for _ in range(2))
    estimates = torch.stack([reference_kl(own[i:i + 1], other[i:i + 1], torch.ones(1, dtype=torch.bool), normalizer=1.0)[0] for i in range(50)])
    assert float((own.exp() * estimates).sum()) == pytest.approx(float((own.exp() * (own - other)).sum()), rel=1e-9)
    mask = torch.rand(50, generator=generator) > 0.3
    assert torch.autograd.gradcheck(lambda x: reference_kl(x, other, mask, normalizer=3.0)[0], (own.clone().requires_grad_(),))


def test_reference_kl_is_not_carried_away() -> None:
    current = torch.tensor([-100.0, -1.0, float("nan")], requires_grad=True)
    value, _ = reference_kl(current, torch.tensor([0.0, -1.0, float("inf")]), torch.tensor([True, True, False]), normalizer=1.0)
    value.backward()
    assert torch.isfinite(value) and current.grad is not None and current.grad.tolist() == [0.0, 0.0, 0.0]

"""The parts of an objective on small numbers that can be checked by eye; docs/algorithms.md has their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.algorithms import surrogates
from workers.algorithms.aggregation import normalizer, token_weights
from workers.algorithms.corrections import behavior_weights, bounded, second_moment_cut, trust_region_tokens
from workers.algorithms.divergences import divergence
from workers.algorithms.ratios import Responses, importance_ratio, log_ratio_at

RESPONSES = Responses(torch.tensor([0, 0, 1, 1, 1]), torch.tensor([2.0, 2.0, 0.0], dtype=torch.float64))
LOG_RATIO = torch.tensor([0.1, 0.3, -0.2, 0.0, 0.4], dtype=torch.float64)  # the fourth is no action


def test_levels_of_a_ratio() -> None:
    assert log_ratio_at("token", LOG_RATIO, None) is LOG_RATIO
    assert log_ratio_at("sequence", LOG_RATIO, RESPONSES).tolist() == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.2])
    assert log_ratio_at("geometric", LOG_RATIO, RESPONSES).tolist() == pytest.approx([0.2, 0.2, 0.1, 0.1, 0.1])
    with pytest.raises(ValueError, match="level 'sequence' need to know which response"):
        log_ratio_at("sequence", LOG_RATIO, None)


def test_a_geometric_ratio_has_the_value_of_the_response_and_the_gradient_of_the_token() -> None:
    current = LOG_RATIO.clone().requires_grad_()
    ratio = importance_ratio(current, torch.zeros(5, dtype=torch.float64), "geometric", RESPONSES)
    assert ratio.tolist() == pytest.approx([math.exp(0.2)] * 2 + [math.exp(0.1)] * 3)
    [gradient] = torch.autograd.grad(ratio[0], current)
    assert gradient.tolist() == pytest.approx([math.exp(0.2), 0, 0, 0, 0])


def test_clipping() -> None:
    ratio = torch.tensor([0.5, 1.1, 1.5, 0.5, 1.5, 5.0])
    advantage = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    objective, clipped = surrogates.clipped(ratio, advantage, 0.2, 0.28)
    assert objective.tolist() == pytest.approx([0.5, 1.1, 1.28, -0.8, -1.5, -5.0])
    assert clipped.tolist() == [False, False, True, True, False, False]
    objective, clipped = surrogates.clipped(ratio, advantage, 0.2, 0.2, dual=3.0)
    assert objective.tolist() == pytest.approx([0.5, 1.1, 1.2, -0.8, -1.5, -3.0]) and clipped.tolist()[-1]


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    current = torch.tensor([-1.0, -2.0], requires_grad=True)
    objective, clipped = surrogates.cispo(torch.tensor([9.0, 0.1]), current, torch.tensor([1.0, 2.0]), 1.0, 4.0)
    objective.sum().backward()
    assert clipped.tolist() == [True, False] and current.grad is not None and current.grad.tolist() == pytest.approx([5.0, 0.2])


@settings(deadline=None)
@given(st.floats(0.1, 5), st.floats(0.1, 5), st.floats(-3, 3))
def test_soft_gates_have_slope_one_at_a_ratio_of_one(positive: float, negative: float, advantage: float) -> None:
    ratio = torch.ones(1, dtype=torch.float64, requires_grad=True)
    objective, clipped = surrogates.sapo(ratio, torch.tensor([advantage], dtype=torch.float64), positive, negative)
    objective.sum().backward()
    assert ratio.grad is not None and float(ratio.grad) == pytest.approx(advantage) and not clipped.any()


def test_weights_and_their_bounds() -> None:
    weights = behavior_weights(LOG_RATIO, torch.zeros(5, dtype=torch.float64), "sequence", RESPONSES)
    assert weights.tolist() == pytest.approx([math.exp(0.4)] * 2 + [math.exp(0.2)] * 3)
    raw = torch.tensor([0.2, 0.5, 1.0, 5.0, 9.0])
    masked, outside = bounded(raw, 0.5, 5.0, clamp=False)
    assert masked.tolist() == pytest.approx([0.0, 0.5, 1.0, 5.0, 0.0]) and outside.tolist() == [True, False, False, False, True]
    clamped, _ = bounded(raw, 0.5, 5.0, clamp=True)
    assert clamped.tolist() == pytest.approx([0.5, 0.5, 1.0, 5.0, 5.0])


def test_what_a_trust_region_is_about() -> None:
    log_ratio, advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0, 1.0])
    assert trust_region_tokens(log_ratio, advantages).tolist() == [True, False, False, True, False, False]


@pytest.mark.parametrize(("squares", "limit", "cut"), [
    ([], 0.1, math.inf), ([0.1, 0.1], 0.1, math.inf), ([0.0, 1.0, 0.2], 0.1, 0.2), ([0.3, 0.0, 0.3, 0.0], 0.14, 0.0),
    ([0.3, 0.0, 0.3, 0.0], 0.15, math.inf), ([2.0, 3.0], 0.1, 0.0), ([0.05, 2.0, 3.0], 0.1, 0.05)], ids=str)
def test_the_second_moments_cut(squares: list[float], limit: float, cut: float) -> None:
    assert second_moment_cut(torch.tensor(squares, dtype=torch.float64), limit) == pytest.approx(cut)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.sampled_from([0.01, 0.5]), st.floats(1e-6, 4)), min_size=1, max_size=30), st.floats(0.01, 1), st.randoms())
def test_as_few_tokens_are_left_out_as_the_limit_allows(squares: list[float], limit: float, random: object) -> None:
    values = torch.tensor(squares, dtype=torch.float64)
    cut = second_moment_cut(values, limit)
    kept, dropped = values[values <= cut], values[values > cut]
    assert not len(kept) or float(kept.mean()) <= limit * (1 + 1e-9)
    if len(dropped):
        larger = values[values <= dropped.min()]
        assert float(larger.mean()) > limit * (1 - 1e-9), "the least of those left out could not have stayed"
    shuffled = squares.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert second_moment_cut(torch.tensor(shuffled, dtype=torch.float64), limit) == cut


def test_divergences_over_all_tokens_of_a_distribution() -> None:
    """k1 and k3 are without bias, and so is the gradient of k2; that of k1 is 0 on average."""
    generator = torch.Generator().manual_seed(0)
    logits, other = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    reference, leaf = torch.log_softmax(other, 0), logits.clone().requires_grad_()
    own = torch.log_softmax(leaf, 0)
    probabilities = own.detach().exp()
    exact = (own.exp() * (own - reference)).sum()
    [gradient] = torch.autograd.grad(exact, leaf, retain_graph=True)
    for estimator in ("k1", "k3"):
        assert float((probabilities * divergence(estimator, own, reference)).sum().detach()) == pytest.approx(exact.item(), rel=1e-9)
    slopes = {estimator: torch.autograd.grad((probabilities * divergence(estimator, own, reference)).sum(), leaf, retain_graph=True)[0]
              for estimator in ("k1", "k2")}
    assert torch.allclose(slopes["k2"], gradient, atol=1e-12) and torch.allclose(slopes["k1"], torch.zeros(50, dtype=torch.float64), atol=1e-12)


def test_k3_is_not_carried_away() -> None:
    current = torch.tensor([-100.0, -1.0], requires_grad=True)
    values = divergence("k3", current, torch.tensor([0.0, -1.0]))
    values.sum().backward()
    assert torch.isfinite(values).all() and current.grad is not None and current.grad.tolist() == [0.0, 0.0]


def test_aggregation() -> None:
    assert token_weights("sequence_mean", RESPONSES).tolist() == [0.5] * 5
    assert token_weights("token_mean", RESPONSES).tolist() == token_weights("fixed_length", RESPONSES).tolist() == [1.0] * 5
    assert [normalizer(kind, 40, 3, 16) for kind in ("token_mean", "sequence_mean", "fixed_length")] == [40.0, 3.0, 48.0]
    assert normalizer("token_mean", 0, 0, 16) == normalizer("fixed_length", 0, 0, 16) == 1.0

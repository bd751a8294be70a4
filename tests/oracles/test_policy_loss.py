"""The policy's loss and its parts against the references, in float64 and float32, and their gradients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import policy, reductions
from tests.oracles.cases import Case, cases, draw_case, objectives
from tests.oracles.composed import FIXED_LENGTH, composed, ratios
from workers.algorithms import aggregation as implemented_aggregation
from workers.algorithms import corrections, surrogates
from workers.algorithms.divergences import divergence
from workers.algorithms.loss_statistics import merge_stats, summarize
from workers.algorithms.policy_loss import Objective, policy_loss
from workers.algorithms.proximal import loglinear_logprobs
from workers.algorithms.ratios import MAX_LOG_RATIO, importance_ratio

LEVELS = ["token", "sequence", "geometric"]
TIGHT: dict[str, float] = {"rel": 1e-10, "abs": 1e-13}


def normalizer_of(case: Case, aggregation: Any) -> float:
    return implemented_aggregation.normalizer(aggregation, sum(case.lengths), sum(length > 0 for length in case.lengths), FIXED_LENGTH)


def flat(rows: list[list[Any]]) -> list[Any]:
    return [value for row in rows for value in row]


def used(values: Tensor, case: Case) -> list[float]:
    """Of actions only."""
    return values[case.flat("masks")].tolist()


def used_of(rows: list[list[float]], case: Case) -> list[float]:
    return [value for row, mask in zip(rows, case.masks, strict=True) for value, action in zip(row, mask, strict=True) if action]


def assert_close(found: Tensor, expected: list[float], share: float) -> None:
    """To `share` of the largest expected one, where there are large ones that cancel or small ones that vanish beside them."""
    scale = max([abs(value) for value in expected], default=0.0)
    assert found.isfinite().all()
    for one, other in zip(found.tolist(), expected, strict=True):
        assert abs(one - other) <= share * (scale + 1e-3)


@settings(max_examples=300)
@given(case=cases(), objective=objectives())
def test_loss_and_gradients_are_those_of_the_papers(case: Case, objective: Objective) -> None:
    """Whatever stands under the mask, and by each token's own gradient where the ratio is the response's."""
    inputs, expected = case.inputs(), composed(case, objective)
    loss, _ = policy_loss(inputs, objective, normalizer=normalizer_of(case, objective.aggregation))
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected.loss, **TIGHT)
    assert inputs.entropy is not None
    by_logprob, by_entropy = torch.autograd.grad(loss, [inputs.current, inputs.entropy], allow_unused=True, materialize_grads=True)
    assert by_logprob.tolist() == pytest.approx(flat(expected.by_logprob), **TIGHT)
    assert by_entropy.tolist() == pytest.approx(flat(expected.by_entropy), **TIGHT)
    assert not by_logprob[~inputs.mask].any()
    assert not by_entropy[~inputs.mask].any()


def settled(case: Case, objective: Objective) -> bool:
    """Whether float32 comes to the same decisions: no ratio or weight lies at a bound."""
    bounds = [1 - objective.clip_low, 1 + objective.clip_high, objective.weight_low, objective.weight_high, objective.dual_clip]
    for row, mask in enumerate(case.masks):
        old = case.proximal[row] if objective.decoupled else case.behavior[row]
        moved = [*ratios(objective.ratio, case.current[row], old, mask), *ratios(objective.weight_level, old, case.behavior[row], mask)]
        if any(math.isclose(value, bound, rel_tol=1e-4) for value in moved for bound in bounds if bound):
            return False
    return True


@given(case=cases([0.0, 0.01, 0.3]), objective=objectives())
def test_float32_comes_within_rounding(case: Case, objective: Objective) -> None:
    """1e-4 of the largest token: a ratio carries the rounding of its log-probs, of up to 10 nats, 6e-8 each, over a response."""
    if not settled(case, objective):
        return
    inputs, expected = case.inputs(torch.float32), composed(case, objective)
    loss, _ = policy_loss(inputs, objective, normalizer=normalizer_of(case, objective.aggregation))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.loss, rel=1e-4, abs=1e-4)
    [by_logprob] = torch.autograd.grad(loss, [inputs.current])
    assert_close(by_logprob, flat(expected.by_logprob), 1e-4)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("surrogate", ["clip", "sapo", "none"])
def test_gradcheck(surrogate: Any, aggregation: Any) -> None:
    """Of the forms without a stopped gradient, away from kinks."""
    objective = Objective(surrogate=surrogate, dual_clip=3.0 if surrogate == "clip" else 0.0, kl_weight=0.1, entropy_weight=0.01,
                          aggregation=aggregation)
    case = next(case for seed in range(100) if away_from_kinks(case := draw_case([5, 1, 7, 2], seed, 0.5, 0.0, False), objective))
    inputs = case.inputs()

    def loss(current: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(dataclasses.replace(inputs, current=current, entropy=entropy), objective, normalizer=7.0)[0]

    assert torch.autograd.gradcheck(loss, (inputs.current, inputs.entropy))


def away_from_kinks(case: Case, objective: Objective) -> bool:
    return settled(case, objective) and any(any(mask) for mask in case.masks)


@pytest.mark.parametrize("surrogate", ["clipped", "dual", "sapo", "unclipped"])
def test_gradcheck_of_surrogates(surrogate: str) -> None:
    ratio = torch.tensor([0.3, 0.79, 0.9, 1.0, 1.1, 1.3, 2.9, 3.2], dtype=torch.float64, requires_grad=True)
    functions = {"clipped": lambda u, a: surrogates.clipped(u, a, 0.2, 0.28)[0], "dual": lambda u, a: surrogates.clipped(u, a, 0.2, 0.28, 3.0)[0],
                 "sapo": lambda u, a: surrogates.sapo(u, a, 1.0, 1.05)[0], "unclipped": lambda u, a: surrogates.unclipped(u, a)[0]}
    for sign in (1.5, -1.5):
        assert torch.autograd.gradcheck(lambda u: functions[surrogate](u, torch.full_like(u, sign)), (ratio,))  # noqa: B023


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradcheck_of_divergences(estimator: Any) -> None:
    current = torch.tensor([-0.1, -1.0, -7.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: divergence(estimator, x, torch.tensor([-2.0, -1.0, -0.3], dtype=torch.float64)), (current,))


@given(case=cases(), level=st.sampled_from(LEVELS))
def test_ratios_and_weights(case: Case, level: Any) -> None:
    mask = case.flat("masks")
    current, old = (torch.where(mask, case.flat(name), 0.0) for name in ("current", "proximal"))
    expected = used_of([ratios(level, *rows) for rows in zip(case.current, case.proximal, case.masks, strict=True)], case)
    assert used(importance_ratio(current.requires_grad_(), old, level, case.responses()), case) == pytest.approx(expected, **TIGHT)
    weights = corrections.behavior_weights(current, old, level, case.responses())
    assert not weights.requires_grad
    assert used(weights, case) == pytest.approx(expected, **TIGHT)


@given(case=cases())
def test_gspo_is_gspo_token_where_a_response_has_one_advantage(case: Case) -> None:
    """GSPO (arXiv 2507.18071), section 4.3: value and gradient are the same, so that no gradient has to pass a sum over a response."""
    case = dataclasses.replace(case, advantages=[[row[0] if math.isfinite(row[0]) else 1.0] * len(row) for row in case.advantages],
                               kept=[[True] * len(row) for row in case.kept])
    objective = Objective(decoupled=False, ratio="geometric", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean")
    inputs, number = case.inputs(), sum(length > 0 for length in case.lengths) or 1
    loss, _ = policy_loss(inputs, objective, normalizer=number)
    [found] = torch.autograd.grad(loss, [inputs.current])
    values, expected = [], []
    for row, mask in enumerate(case.masks):
        ratio = policy.sequence_ratio(case.current[row], case.behavior[row], mask)
        value, slope = policy.ppo(ratio, case.advantages[row][0], 3e-4, 4e-4)
        values.append(-value / number if any(mask) else 0.0)
        expected += [-gradient / number for gradient in policy.gspo_gradient(ratio, slope, mask)]
    assert loss.item() == pytest.approx(math.fsum(values), **TIGHT)
    assert found.tolist() == pytest.approx(expected, **TIGHT)


@given(weights=st.lists(st.floats(0, 1e6), max_size=8), cap=st.floats(1, 10), floor=st.floats(0, 1))
def test_bounds_of_weights(weights: list[float], cap: float, floor: float) -> None:
    tensor = torch.tensor(weights, dtype=torch.float64)
    clamped, outside = corrections.bounded(tensor, 0.0, cap, clamp=True)
    assert clamped.tolist() == [policy.truncated(weight, cap) for weight in weights]
    assert outside.tolist() == [weight > cap for weight in weights]
    assert corrections.bounded(tensor, 0.0, cap, clamp=False)[0].tolist() == [policy.masked(weight, cap) for weight in weights]
    assert corrections.bounded(tensor, floor, cap, clamp=False)[0].tolist() == [policy.icepop(weight, floor, cap) for weight in weights]


def implemented_m2po(case: Case, threshold: float) -> Tensor:
    mask = case.flat("masks")
    log_ratio, advantages = (case.flat("proximal") - case.flat("behavior"))[mask], case.flat("advantages")[mask]
    concerned = corrections.trust_region_tokens(log_ratio, advantages)
    cut = corrections.second_moment_cut(log_ratio.square()[concerned], threshold)
    return ~(concerned & (log_ratio.square() > cut))


@given(case=cases([0.01, 0.3, 2.0]), threshold=st.sampled_from([1e-6, 0.01, 0.04, 0.5, 5.0]))
def test_second_moment(case: Case, threshold: float) -> None:
    gaps = [[centre - old for centre, old in zip(*rows, strict=True)] for rows in zip(case.proximal, case.behavior, strict=True)]
    expected = policy.m2po(gaps, case.advantages, case.masks, threshold)
    assert implemented_m2po(case, threshold).tolist() == used_of(expected, case)


@given(squares=st.lists(st.sampled_from([2**-14, 2**-8, 0.25, 1.0]), max_size=12), threshold=st.sampled_from([1e-5, 0.01, 0.04, 0.3]))
def test_second_moment_of_equal_ones(squares: list[float], threshold: float) -> None:
    """Algorithm 1 takes equal ones in any order; here they go together, so never less is left out, and by no more than those."""
    cut = corrections.second_moment_cut(torch.tensor(squares, dtype=torch.float64), threshold)
    kept = [value for value in squares if value <= cut]
    exact = policy.m2po([[math.sqrt(value) for value in squares]], [[1.0] * len(squares)], [[True] * len(squares)], threshold)[0]
    remaining = sorted(value for value, stays in zip(squares, exact, strict=True) if stays)
    assert not kept or math.fsum(kept) / len(kept) <= threshold * (1 + 1e-9)
    assert sorted(kept) == [value for value in remaining if squares.count(value) == remaining.count(value)]


@given(case=cases(), estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_divergences(case: Case, estimator: Any) -> None:
    expected = [{"k1": reductions.k1, "k2": reductions.k2, "k3": reductions.k3}[estimator](now, before)[0]
                for now, before in zip(used_of(case.current, case), used_of(case.reference, case), strict=True)]
    assert used(divergence(estimator, case.flat("current"), case.flat("reference")), case) == pytest.approx(expected, **TIGHT)


@given(case=cases(), aggregation=st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]))
def test_aggregation(case: Case, aggregation: Any) -> None:
    """The papers' means, over responses that all have actions."""
    case = dataclasses.replace(case, masks=[[True, *mask[1:]] for mask in case.masks],
                               entropy=[[0.5, *row[1:]] for row in case.entropy])
    weights = implemented_aggregation.token_weights(aggregation, case.responses())
    found = torch.where(case.flat("masks"), case.flat("entropy") * weights, 0.0).sum() / normalizer_of(case, aggregation)
    expected = {"token_mean": lambda: reductions.token_mean(case.entropy, case.masks),
                "sequence_mean": lambda: reductions.sequence_mean(case.entropy, case.masks),
                "fixed_length": lambda: reductions.fixed_length(case.entropy, case.masks, FIXED_LENGTH)}[aggregation]()
    assert found.item() == pytest.approx(expected, **TIGHT)


@given(case=cases(), seed=st.integers(0, 2**32 - 1), version=st.integers(0, 5))
def test_loglinear_proximal_policy(case: Case, seed: int, version: int) -> None:
    """A-3PO (arXiv 2512.06547), Eq. 3: alpha = (v_prox - v_behav) / (v - v_behav), v = v_prox + 1; a token of the newest version keeps its own."""
    versions = torch.randint(0, 6, (len(case.flat("current")),), generator=torch.Generator().manual_seed(seed))
    found = loglinear_logprobs(case.flat("current").requires_grad_(), case.flat("behavior"), versions, version)
    assert not found.requires_grad
    rows = (flat(case.current), flat(case.behavior), versions.tolist(), flat(case.masks))
    for value, now, before, own, action in zip(found.tolist(), *rows, strict=True):
        if action:
            alpha = (version - own) / (version + 1 - own) if own < version else 0.0
            assert value == pytest.approx(before + alpha * (now - before), **TIGHT)


@given(objective=objectives(), gap=st.sampled_from([21.0, 80.0, 1e4, -80.0, -1e4]), advantage=st.sampled_from([2.0, -2.0]))
def test_extreme_ratios_stay_finite(objective: Objective, gap: float, advantage: float) -> None:
    """A ratio above e^20 counts as that, without gradient; one that vanishes is 0."""
    for dtype in (torch.float64, torch.float32):
        case = Case([[True, True]], [[-1.0, -1.0]], [[-1.0 - gap, -1.0]], [[-1.0 - gap / 2, -1.0]], [[-1.0, -1.0 + gap]], [[1.0, 1.0]],
                    [[advantage, 1.0]], [[True, True]])
        inputs = case.inputs(dtype)
        loss, stats = policy_loss(inputs, objective, normalizer=2.0)
        [gradient] = torch.autograd.grad(loss, [inputs.current])
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert all(math.isfinite(value) for value in summarize(merge_stats([stats])).values())
    ratio = importance_ratio(torch.tensor([0.0]), torch.tensor([-gap])).item()
    assert ratio == pytest.approx(math.exp(min(gap, MAX_LOG_RATIO)) if gap > -700 else 0.0)


@given(case=cases(), objective=objectives())
def test_statistics_are_counts_over_actions(case: Case, objective: Objective) -> None:
    """Shares and means by the definitions, from the references' numbers."""
    if not settled(case, objective):
        return
    _, stats = policy_loss(case.inputs(), objective, normalizer=1.0)
    merged, clipped, dropped, weights = merge_stats([stats]), 0, 0, []
    for row, mask in enumerate(case.masks):
        old = case.proximal[row] if objective.decoupled else case.behavior[row]
        moved = ratios(objective.ratio, case.current[row], old, mask)
        own = ratios(objective.weight_level, old, case.behavior[row], mask) if objective.decoupled else [1.0] * len(mask)
        for token, action in enumerate(mask):
            if action:
                weights.append(own[token])
                dropped += not (objective.weight_low <= own[token] <= objective.weight_high and case.kept[row][token])
                clipped += was_clipped(objective, moved[token], case.advantages[row][token])
    assert merged["tokens"] == len(weights)
    assert merged["clipped"] == clipped
    assert merged["capped"] == dropped
    assert merged["weight"] == pytest.approx(math.fsum(weights), **TIGHT)
    assert merged["weight_squared"] == pytest.approx(math.fsum(weight**2 for weight in weights), **TIGHT)
    assert merged["max_weight"] == pytest.approx(max(weights, default=0.0), **TIGHT)


def was_clipped(objective: Objective, ratio: float, advantage: float) -> bool:
    match objective.surrogate:
        case "cispo":
            return not 1 - objective.clip_low <= ratio <= 1 + objective.clip_high
        case "clip" if advantage > 0:
            return ratio > 1 + objective.clip_high
        case "clip" if advantage < 0:
            return ratio < 1 - objective.clip_low or (objective.dual_clip > 0 and ratio > objective.dual_clip)
        case _:
            return False

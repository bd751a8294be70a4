"""The policy's loss as a whole: what must hold for every choice of its parts, and what its statistics say."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.algorithms.loss_statistics import merge_stats, summarize
from workers.algorithms.policy_loss import Objective, TokenInputs, policy_loss
from workers.algorithms.ratios import Responses

NUM = 24
OBJECTIVES = {
    "decoupled": Objective(weight_high=1.3),
    "plain": Objective(decoupled=False),
    "higher": Objective(clip_high=0.28, dual_clip=3.0),
    "gspo": Objective(ratio="geometric", weight_level="geometric", clip_low=3e-3, clip_high=4e-3, aggregation="sequence_mean"),
    "plain-gspo": Objective(decoupled=False, ratio="geometric", aggregation="sequence_mean"),
    "cispo": Objective(surrogate="cispo", clip_low=1.0, clip_high=0.1),
    "sapo": Objective(surrogate="sapo", aggregation="sequence_mean"),
    "unclipped": Objective(surrogate="none", weight_high=float("inf"), aggregation="fixed_length"),
    "sequence-weights": Objective(weight_level="sequence", weight_high=2.0, clamp_weights=True),
    "icepop": Objective(weight_low=0.5),
    "regularized": Objective(kl_weight=0.3, kl_estimator="k2", entropy_weight=0.1, aggregation="sequence_mean"),
}
NAMES = pytest.mark.parametrize("name", OBJECTIVES)


def case(seed: int, num: int = NUM, spread: float = 0.4) -> TokenInputs:
    """Tokens of four responses, about a third of them masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(num, generator=generator, dtype=torch.float64)

    base = -normal().abs() - 0.1
    mask = torch.rand(num, generator=generator) > 0.3
    index = torch.randint(0, 4, (num,), generator=generator).sort().values
    return TokenInputs(
        current=base + spread * normal(), proximal=base + spread * normal(), behavior=base + spread * normal(), advantages=normal(), mask=mask,
        reference=base + normal(), entropy=normal().abs(), kept=torch.rand(num, generator=generator) > 0.1, responses=responses_of(index, mask))


def responses_of(index: Tensor, mask: Tensor) -> Responses:
    return Responses(index, torch.zeros(4, dtype=torch.float64).index_add_(0, index, mask.double()))


def evaluated(inputs: TokenInputs, objective: Objective, normalizer: float = 7.0) -> tuple[float, Tensor, dict[str, float]]:
    """Loss, gradient of the log-probs, statistics."""
    current = inputs.current.clone().requires_grad_()
    loss, stats = policy_loss(replace(inputs, current=current), objective, normalizer=normalizer)
    [gradient] = torch.autograd.grad(loss, current)
    return loss.item(), gradient, merge_stats([stats])


@NAMES
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), poison=st.sampled_from([float("nan"), float("inf"), -1e30, 1e30]))
def test_masked_tokens_contribute_exactly_zero(name: str, seed: int, poison: float) -> None:
    clean = case(seed)
    spoiled = replace(clean, **{part: torch.where(clean.mask, getattr(clean, part), poison)
                                for part in ("current", "proximal", "behavior", "advantages", "reference", "entropy")})
    (loss, gradient, stats), (other, spoiled_gradient, spoiled_stats) = (evaluated(inputs, OBJECTIVES[name]) for inputs in (clean, spoiled))
    assert (gradient[~clean.mask] == 0).all()
    assert loss == other and stats == spoiled_stats and torch.equal(gradient, spoiled_gradient)


@NAMES
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_order_of_tokens_does_not_matter(name: str, seed: int) -> None:
    inputs, order = case(seed), torch.randperm(NUM, generator=torch.Generator().manual_seed(seed))
    assert inputs.responses is not None
    moved = TokenInputs(**{part: value[order] for part, value in vars(inputs).items() if part != "responses"},
                        responses=responses_of(inputs.responses.index[order], inputs.mask[order]))
    (loss, gradient, stats), (other, moved_gradient, moved_stats) = (evaluated(each, OBJECTIVES[name]) for each in (inputs, moved))
    assert other == pytest.approx(loss, rel=1e-9, abs=1e-12) and moved_stats == pytest.approx(stats, rel=1e-9, abs=1e-12)
    assert torch.allclose(moved_gradient, gradient[order], rtol=1e-9, atol=1e-12)


@NAMES
def test_parts_of_a_minibatch_add_up_wherever_its_tokens_are(name: str) -> None:
    """Also where a response is divided: its sums are then added over those who have parts of it."""
    inputs, cuts = case(5), ((0, 7), (7, 15), (15, NUM))
    whole = inputs.responses
    assert whole is not None
    parts = [TokenInputs(**{name_: value[low:high] for name_, value in vars(inputs).items() if name_ != "responses"}) for low, high in cuts]
    objective = OBJECTIVES[name]
    proximal = inputs.proximal if objective.decoupled else inputs.behavior
    everywhere = {  # what a collective would find: the ratios' sums, then the weights'
        "ratio": torch.where(inputs.mask, inputs.current - proximal, 0.0), "weight": torch.where(inputs.mask, proximal - inputs.behavior, 0.0)}
    losses, gradients, stats = [], [], []
    for part, (low, high) in zip(parts, cuts, strict=True):
        asked = iter([kind for kind, level in (("ratio", objective.ratio), ("weight", objective.weight_level)) if level != "token"])

        def add(own: Tensor, asked: Any = asked, low: int = low, high: int = high) -> Tensor:
            values = everywhere[next(asked)]
            alone = torch.zeros(4, dtype=torch.float64).index_add_(0, whole.index[low:high], values[low:high])
            assert torch.allclose(own, alone, atol=1e-12)
            return torch.zeros(4, dtype=torch.float64).index_add_(0, whole.index, values)

        loss, gradient, statistics = evaluated(replace(part, responses=Responses(whole.index[low:high], whole.lengths, add)), objective)
        losses.append(loss)
        gradients.append(gradient)
        stats.append(statistics)
    loss, gradient, statistics = evaluated(inputs, objective)
    assert math.fsum(losses) == pytest.approx(loss, rel=1e-12) and torch.allclose(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15)
    assert merge_stats(stats) == pytest.approx(statistics, rel=1e-12)


@NAMES
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_on_policy_every_objective_is_the_policy_gradient(name: str, seed: int) -> None:
    inputs = case(seed, spread=0.0)
    inputs = replace(inputs, proximal=inputs.current, behavior=inputs.current, kept=None)
    objective = replace(OBJECTIVES[name], kl_weight=0.0, entropy_weight=0.0)
    assert inputs.responses is not None
    weights = 1 / inputs.responses.token_lengths() if objective.aggregation == "sequence_mean" else torch.ones(NUM)
    expected = torch.where(inputs.mask, -inputs.advantages * weights / 7.0, 0.0)
    assert torch.allclose(evaluated(inputs, objective)[1], expected, rtol=1e-12, atol=1e-15)


def test_the_ratio_and_the_weight_of_a_response_make_up_its_ratio_to_the_behaviour_policy() -> None:
    inputs = replace(case(2), kept=None)
    free = Objective(ratio="geometric", weight_level="geometric", surrogate="none", weight_high=float("inf"))
    decoupled, plain = (evaluated(inputs, replace(free, decoupled=flag, weight_level="geometric" if flag else "token")) for flag in (True, False))
    assert decoupled[0] == pytest.approx(plain[0], rel=1e-12) and torch.allclose(decoupled[1], plain[1], rtol=1e-12)


def test_what_is_needed_and_not_given_is_said() -> None:
    inputs = case(0)
    for objective, missing, words in ((OBJECTIVES["gspo"], "responses", "which response"), (OBJECTIVES["sapo"], "responses", "which response"),
                                      (OBJECTIVES["regularized"], "reference", "`reference`, which is not given"),
                                      (OBJECTIVES["regularized"], "entropy", "`entropy`, which is not given")):
        with pytest.raises(ValueError, match=words):
            policy_loss(replace(inputs, **{missing: None}), objective, normalizer=1.0)


def test_a_token_far_from_everything_does_not_carry_the_loss_away() -> None:
    far = torch.tensor([-200.0, 0.0, -1.0], dtype=torch.float64)
    inputs = TokenInputs(current=far, proximal=far.flip(0), behavior=far.roll(1), advantages=torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64),
                         mask=torch.ones(3, dtype=torch.bool), reference=far.flip(0), entropy=torch.zeros(3, dtype=torch.float64),
                         responses=Responses(torch.tensor([0, 0, 1]), torch.tensor([2.0, 1.0])))
    for objective in OBJECTIVES.values():
        loss, gradient, _ = evaluated(inputs, replace(objective, kl_weight=0.1, kl_estimator="k3"))
        assert math.isfinite(loss) and torch.isfinite(gradient).all()


def test_metrics() -> None:
    current = torch.tensor([0.0, 0.5, -0.5, 9.0], dtype=torch.float64)
    behavior = torch.tensor([0.0, -math.log(2.0), -math.log(8.0), 3.0], dtype=torch.float64)
    inputs = TokenInputs(current, torch.zeros(4, dtype=torch.float64), behavior, torch.ones(4, dtype=torch.float64),
                         torch.tensor([True, True, True, False]), reference=torch.zeros(4, dtype=torch.float64))
    metrics = summarize(evaluated(inputs, Objective(), normalizer=3.0)[2])
    assert metrics["behavior_weight_mean"] == pytest.approx(11 / 3)
    assert metrics["behavior_weight_max"] == pytest.approx(8)
    assert metrics["behavior_ess"] == pytest.approx(11**2 / (3 * 69))
    assert metrics["behavior_masked_share"] == pytest.approx(1 / 3)
    assert metrics["clip_share"] == pytest.approx(1 / 3)
    assert metrics["gap_current_proximal"] == pytest.approx(1 / 3)
    assert metrics["kl_proximal"] == pytest.approx(0.0)
    assert metrics["kl_reference"] == pytest.approx((math.exp(-0.5) + math.exp(0.5) - 2) / 3)


def test_dropped_tokens_are_counted_and_stay_in_the_denominator() -> None:
    inputs = replace(case(4), kept=torch.arange(NUM) % 2 == 0)
    loss, gradient, stats = evaluated(inputs, Objective(weight_high=float("inf")))
    assert stats["capped"] == (inputs.mask & ~inputs.kept).sum() and (gradient[~inputs.kept] == 0).all()
    kept_only, _, _ = evaluated(replace(inputs, mask=inputs.mask & inputs.kept, kept=None), Objective(weight_high=float("inf")))
    assert loss == pytest.approx(kept_only, rel=1e-12)

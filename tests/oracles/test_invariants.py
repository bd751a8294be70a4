"""What holds for every algorithm, whatever its formula: on-policy they are the policy gradient, masked tokens are not there, order means nothing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles.cases import SPREADS, Case, cases, draw_case, objectives
from tests.oracles.composed import normalizer
from workers.algorithms import advantages
from workers.algorithms.loss_statistics import merge_stats
from workers.algorithms.policy_loss import Objective, TokenInputs, policy_loss
from workers.algorithms.ratios import Responses

PLAIN = {"kl_weight": 0.0, "entropy_weight": 0.0}
SEEDS = st.integers(0, 2**32 - 1)


def loss_and_gradients(inputs: TokenInputs, objective: Objective, total: float) -> tuple[Tensor, Tensor, Tensor]:
    assert inputs.entropy is not None
    loss, _ = policy_loss(inputs, objective, normalizer=total)
    by_logprob, by_entropy = torch.autograd.grad(loss, [inputs.current, inputs.entropy], allow_unused=True, materialize_grads=True)
    return loss.detach(), by_logprob, by_entropy


def policy_gradient(case: Case, objective: Objective) -> list[float]:
    """REINFORCE (Williams, 1992): minus the advantage of every action, as it is aggregated."""
    total, expected = normalizer(case, objective.aggregation), []
    for row, mask in enumerate(case.masks):
        scale = 1 / sum(mask) if objective.aggregation == "sequence_mean" and any(mask) else 1.0
        expected += [-scale * advantage / total if used else 0.0 for advantage, used in zip(case.advantages[row], mask, strict=True)]
    return expected


@given(case=cases(), objective=objectives(**PLAIN))
def test_on_policy_every_objective_has_the_policy_gradient(case: Case, objective: Objective) -> None:
    """eta = 0 and one minibatch: behaviour, proximal and current policy are one. Decoupled or not, clipped, gated or not, at every level."""
    case = dataclasses.replace(case, proximal=case.current, behavior=case.current, kept=[[True] * len(row) for row in case.kept])
    _, found, _ = loss_and_gradients(case.inputs(), objective, normalizer(case, objective.aggregation))
    assert found.tolist() == pytest.approx(policy_gradient(case, objective), rel=1e-12, abs=1e-15)


@given(case=cases())
def test_on_policy_decoupled_ppo_is_ppo_to_the_bit(case: Case) -> None:
    case = dataclasses.replace(case, proximal=case.current, behavior=case.current, kept=[[True] * len(row) for row in case.kept])
    results = [loss_and_gradients(case.inputs(), objective, 7.0) for objective in
               (Objective(decoupled=True), Objective(decoupled=False), Objective(decoupled=False, surrogate="none"))]
    for loss, gradient, _ in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(gradient, results[0][1])


@given(case=cases())
def test_of_fresh_tokens_decoupled_ppo_is_ppo(case: Case) -> None:
    """Where the proximal policy has sampled, in any minibatch."""
    case = dataclasses.replace(case, behavior=case.proximal, kept=[[True] * len(row) for row in case.kept])
    one, other = (loss_and_gradients(case.inputs(), Objective(decoupled=decoupled), 7.0) for decoupled in (True, False))
    assert torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=SEEDS, spread=st.sampled_from(SPREADS), objective=objectives(),
       garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_masked_tokens_are_not_there(lengths: list[int], seed: int, spread: float, objective: Objective, garbage: float,
                                     dtype: torch.dtype) -> None:
    """To the bit: with zeros or garbage under the mask loss, gradients and statistics are the same, and gradients there exactly zero."""
    clean, dirty = (draw_case(lengths, seed, spread, under, False) for under in (0.0, garbage))
    total = normalizer(clean, objective.aggregation)
    for one, other in zip(*(loss_and_gradients(case.inputs(dtype), objective, total) for case in (clean, dirty)), strict=True):
        assert torch.equal(one, other)
    _, by_logprob, by_entropy = loss_and_gradients(dirty.inputs(dtype), objective, total)
    outside = ~dirty.flat("masks")
    assert not by_logprob[outside].any()
    assert not by_entropy[outside].any()
    one, other = (merge_stats([policy_loss(case.inputs(dtype), objective, normalizer=total)[1]]) for case in (clean, dirty))
    assert one == other


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4), seed=SEEDS, objective=objectives())
def test_masked_tokens_could_as_well_be_left_out(lengths: list[int], seed: int, objective: Objective) -> None:
    case = draw_case(lengths, seed, 0.3, math.nan, False)
    inputs, mask = case.inputs(), case.flat("masks")
    assume(bool(mask.any()))
    responses = case.responses()
    shorter = TokenInputs(**{name: getattr(inputs, name).detach()[mask] for name in (
        "current", "proximal", "behavior", "advantages", "mask", "reference", "entropy", "kept")},
        responses=Responses(responses.index[mask], responses.lengths))
    shorter.current.requires_grad_()
    assert shorter.entropy is not None
    shorter.entropy.requires_grad_()
    whole, part = loss_and_gradients(inputs, objective, 5.0), loss_and_gradients(shorter, objective, 5.0)
    assert part[0].item() == pytest.approx(whole[0].item(), rel=1e-12, abs=1e-15)
    assert part[1].tolist() == pytest.approx(whole[1][mask].tolist(), rel=1e-12, abs=1e-15)


@given(lengths=st.lists(st.integers(1, 7), min_size=2, max_size=5), seed=SEEDS, objective=objectives(), order=st.randoms(use_true_random=False))
def test_the_order_of_responses_means_nothing(lengths: list[int], seed: int, objective: Objective, order: object) -> None:
    case = draw_case(lengths, seed, 0.3, math.nan, False)
    permutation = list(range(len(lengths)))
    order.shuffle(permutation)  # type: ignore[attr-defined]
    moved = Case(**{field.name: [getattr(case, field.name)[row] for row in permutation] for field in dataclasses.fields(Case)})
    total = normalizer(case, objective.aggregation)
    (loss, gradient, _), (other_loss, other_gradient, _) = (loss_and_gradients(one.inputs(), objective, total) for one in (case, moved))
    assert other_loss.item() == pytest.approx(loss.item(), rel=1e-12, abs=1e-15)
    rows = gradient.split(lengths)
    assert other_gradient.tolist() == pytest.approx(torch.cat([rows[row] for row in permutation]).tolist(), rel=1e-12, abs=1e-15)


@given(case=cases([0.3]), objective=objectives(), cut=st.integers(1, 4))
def test_microbatches_add_up(case: Case, objective: Objective, cut: int) -> None:
    """Loss, gradients and statistics of two parts are those of the whole; a response lies in one of them."""
    assume(cut < len(case.masks))
    total = normalizer(case, objective.aggregation)
    loss, gradient, _ = loss_and_gradients(case.inputs(), objective, total)
    parts = [Case(**{field.name: getattr(case, field.name)[rows] for field in dataclasses.fields(Case)}) for rows in (slice(cut), slice(cut, None))]
    found = [loss_and_gradients(part.inputs(), objective, total) for part in parts]
    assert sum(part[0].item() for part in found) == pytest.approx(loss.item(), rel=1e-12, abs=1e-15)
    assert torch.cat([part[1] for part in found]).tolist() == pytest.approx(gradient.tolist(), rel=1e-12, abs=1e-15)
    whole = merge_stats([policy_loss(case.inputs(), objective, normalizer=total)[1]])
    merged = merge_stats([policy_loss(part.inputs(), objective, normalizer=total)[1] for part in parts])
    assert merged == pytest.approx(whole, rel=1e-12, abs=1e-12)


@given(rewards=st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4), order=st.randoms(use_true_random=False))
def test_advantages_go_along_with_their_samples(rewards: list[list[float]], order: object) -> None:
    """Groups change places, and samples within a group."""
    groups = list(range(len(rewards)))
    order.shuffle(groups)  # type: ignore[attr-defined]
    samples = [0, 1, 2]
    order.shuffle(samples)  # type: ignore[attr-defined]
    given_rewards = torch.tensor(rewards, dtype=torch.float64)
    for estimator in (advantages.group_norm, advantages.group_center, advantages.leave_one_out, advantages.batch_norm):
        expected = estimator(given_rewards)[groups][:, samples]
        found = estimator(given_rewards[groups][:, samples])
        assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), rel=1e-9, abs=1e-9)


@given(rewards=st.lists(st.lists(st.integers(-10, 10), min_size=4, max_size=4), min_size=1, max_size=3), scale=st.sampled_from([0.5, 2.0, 8.0]),
       shift=st.sampled_from([-4.0, 0.0, 1.5]))
def test_advantages_know_of_no_origin_and_normalised_ones_of_no_unit(rewards: list[list[int]], scale: float, shift: float) -> None:
    """But for what `EPSILON` does to spreads of a quarter and more."""
    given_rewards = torch.tensor(rewards, dtype=torch.float64)
    changed = scale * given_rewards + shift
    units = {advantages.group_norm: 1.0, advantages.batch_norm: 1.0, advantages.group_center: scale, advantages.leave_one_out: scale}
    for estimator, unit in units.items():
        assert estimator(changed).flatten().tolist() == pytest.approx((unit * estimator(given_rewards)).flatten().tolist(), rel=1e-5, abs=1e-9)

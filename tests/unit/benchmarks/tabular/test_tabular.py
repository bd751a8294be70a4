"""The table that benchmarks.tabular trains, against drawing and counting; its gradients and comparisons."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("megatron.core")

from benchmarks.tabular.__main__ import breaks
from benchmarks.tabular.cases import along_axes, begin, fresh_of
from benchmarks.tabular.comparison import cost, holm
from benchmarks.tabular.gradients import measure
from benchmarks.tabular.objectives import Method, method
from benchmarks.tabular.policy import VOCAB, Task, first_row, logprobs, numbers, sample, start, success
from benchmarks.tabular.study import Setting, train


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    begin()


def known(name: str) -> Method:
    found = method(name)
    assert isinstance(found, Method)
    return found


@pytest.mark.parametrize("length", [3, 5])
def test_success_is_what_sampling_comes_to(length: int) -> None:
    generator, task = torch.Generator().manual_seed(0), Task.draw(2, length, 1 / 8)
    logits = 10 * start(3, 2, length, generator)
    prompts = torch.arange(2).repeat_interleave(20_000).expand(3, -1)
    tokens, rows = sample(logits, prompts, generator)
    assert task.right.sum(-1).tolist() == [VOCAB**length / 8] * 2 and rows.max() < first_row(length)
    assert torch.allclose(task.rewards(prompts, tokens).mean(-1), success(logits, task), atol=0.01)


def test_the_chances_of_all_answers_add_up_to_one() -> None:
    length = 4
    logits = start(1, 1, length, torch.Generator().manual_seed(0))
    tokens = torch.cartesian_prod(*[torch.arange(VOCAB)] * length)[None]
    rows = torch.stack([numbers(tokens[..., :place]) + first_row(place) for place in range(length)], -1)
    assert math.isclose(float(logprobs(logits, torch.zeros(1, VOCAB**length, dtype=torch.int64), tokens, rows).sum(-1).exp().sum()), 1.0)


def test_old_samples_have_a_gap_and_fresh_ones_have_none_and_success_rises() -> None:
    fresh, old = (train(known("decoupled_ppo"), Setting(eta, 0.1, num_steps=40, num_seeds=4)) for eta in (0, 4))
    assert float(fresh.gap.max()) == 0 and float(fresh.ess.min()) == pytest.approx(1) and float(old.gap[10:].min()) > 0
    assert all(float(course.success[-1].mean()) > 2 * float(course.success[0].mean()) for course in (fresh, old))


def test_drawn_lags_are_of_different_ages_and_zero_of_them_is_fresh() -> None:
    spread = train(known("decoupled_ppo"), Setting(2, 0.1, spread=True, num_steps=20, num_seeds=2))
    assert float(spread.gap[1:].max()) > 0
    assert float(train(known("ppo"), Setting(0, 0.1, spread=True, num_steps=5, num_seeds=2)).gap.max()) == 0


def test_the_gradient_of_fresh_samples_points_where_success_does_and_far_from_them_naive_ppos_does_not() -> None:
    found = measure([known("decoupled_ppo"), known("ppo")], [0.0, 0.2], Setting(0, 0.03), steps=60)
    assert min(each[0].cosine for each in found.values()) > 0.9
    assert found["decoupled_ppo"][1].cosine > found["ppo"][1].cosine + 0.3
    assert found["decoupled_ppo"][1].batches > found["decoupled_ppo"][0].batches, "what is far away is noisy"


def test_a_cost_is_told_with_its_interval() -> None:
    fresh = torch.linspace(0.4, 0.5, 32)
    found = cost(fresh, fresh - 0.1 + 0.01 * torch.linspace(-1, 1, 32))
    assert found.difference == pytest.approx(-0.1) and 0 < found.half < 0.01 and found.p < 1e-6
    assert cost(fresh, fresh).p == 1.0


def test_many_cases_need_more_to_be_worse_than_chance() -> None:
    assert holm([0.04]) == [True] and holm([0.04] * 2) == [False, False]
    assert holm([0.001, 0.2, 0.02]) == [True, False, True] and holm([]) == []


def test_a_method_that_needs_more_than_rewards_is_left_out_with_its_reason() -> None:
    assert method("decoupled_ppo_critic") == "it trains a critic"


def test_an_engine_that_computes_otherwise_has_a_gap_even_with_fresh_samples() -> None:
    course = train(known("decoupled_ppo"), Setting(0, 0.1, mismatch=0.4, num_steps=10, num_seeds=2))
    assert float(course.gap.min()) > 0.1 and float(course.ess.max()) < 0.99


def test_a_case_is_compared_with_its_like_and_breaks_where_all_beyond_it_are_worse() -> None:
    base = Setting(4, 0.03, spread=True, mismatch=0.4, prompts=2, num_steps=20, num_seeds=2)
    fresh = fresh_of(base)
    assert (fresh.eta, fresh.spread, fresh.mismatch, fresh.prompts) == (0, False, 0.0, 2)
    settings = along_axes(fresh, [4, 8])
    assert len(settings) == len(set(settings)) and {fresh_of(each) for each in settings} <= set(settings)
    cases = [{"gap": gap, "apart": {"worse": worse}} for gap, worse in ((0.1, True), (0.2, False), (0.3, True), (0.4, True))]
    assert breaks(cases) == 0.3 and breaks(cases[:2]) is None

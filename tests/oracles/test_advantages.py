"""Advantages, returns and their normalisation against the references."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.oracles import advantages as reference
from tests.oracles.cases import rounded
from workers.algorithms import advantages, values
from workers.algorithms.divergences import divergence

EPS = advantages.EPSILON
REWARDS = st.sampled_from([-5.0, 0.0, 0.25, 1.0, 5.0]) | st.floats(-5, 5).map(lambda value: float(rounded(np.array(value))))
ESTIMATORS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[list[list[float]]], list[list[float]]]]] = {
    "group_norm": (advantages.group_norm, lambda rewards: reference.grpo(rewards, EPS)),
    "group_center": (advantages.group_center, reference.dr_grpo),
    "leave_one_out": (advantages.leave_one_out, reference.rloo),
    "batch_norm": (advantages.batch_norm, lambda rewards: reference.batch_norm(rewards, EPS)),
}


def groups_of(rewards: st.SearchStrategy[float], fewest: int) -> st.SearchStrategy[list[list[float]]]:
    """Groups of one size, some of equal rewards."""
    def of_size(size: int) -> st.SearchStrategy[list[list[float]]]:
        group = st.lists(rewards, min_size=size, max_size=size) | rewards.map(lambda value: [value] * size)
        return st.lists(group, min_size=1, max_size=4)

    return st.integers(fewest, 6).flatmap(of_size)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(data=st.data())
def test_estimators(name: str, data: st.DataObject) -> None:
    """To 1e-9: where rewards hardly differ, their rounding is divided by `EPSILON`."""
    rewards = data.draw(groups_of(REWARDS, fewest=2 if name == "leave_one_out" else 1))
    estimator, expected = ESTIMATORS[name]
    found = estimator(torch.tensor(rewards, dtype=torch.float64))
    assert found.dtype == torch.float64
    for row, other in zip(found.tolist(), expected(rewards), strict=True):
        assert row == pytest.approx(other, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@given(data=st.data())
def test_estimators_in_float32(name: str, data: st.DataObject) -> None:
    """To 1e-5 of the largest, of rewards that differ by a quarter or not at all."""
    rewards = data.draw(groups_of(st.integers(-20, 20).map(lambda value: value / 4), fewest=2 if name == "leave_one_out" else 1))
    estimator, expected = ESTIMATORS[name]
    found = estimator(torch.tensor(rewards, dtype=torch.float32))
    assert found.dtype == torch.float32
    for row, other in zip(found.tolist(), expected(rewards), strict=True):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-4)


@given(reward=st.floats(-1e3, 1e3), size=st.integers(2, 9), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_have_no_advantage_at_all(reward: float, size: int, dtype: torch.dtype) -> None:
    """Exactly zero, though a mean of equal numbers is rarely equal to them."""
    for estimator, _ in ESTIMATORS.values():
        assert not estimator(torch.full((3, size), reward, dtype=dtype)).any()


@given(rewards=st.lists(REWARDS, min_size=2, max_size=5), copies=st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_an_episode_counts_once_however_many_responses_it_has(rewards: list[float], copies: list[int]) -> None:
    episodes = [number for number in range(len(rewards)) for _ in range(copies[number])]
    for estimator, expected in ESTIMATORS.values():
        found = advantages.by_episode(estimator, torch.tensor([rewards[number] for number in episodes], dtype=torch.float64), torch.tensor(episodes))
        [of_episodes] = expected([rewards])
        assert found.tolist() == pytest.approx([of_episodes[number] for number in episodes], rel=1e-9, abs=1e-9)


def together(parts: list[Tensor], function: Callable[[Tensor, advantages.Add], Any]) -> list[Any]:
    """What `function` gives each of several who hold a part each and add up over all of them, side by side."""
    barrier, shared = threading.Barrier(len(parts), timeout=60), [torch.empty(0)] * len(parts)

    def run(number: int) -> Any:
        def add(part: Tensor) -> Tensor:
            shared[number] = part
            barrier.wait()
            total = torch.stack(shared).sum(0)
            barrier.wait()
            return total

        return function(parts[number], add)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


@given(rows=st.lists(st.lists(REWARDS, max_size=6), min_size=1, max_size=3).filter(lambda rows: any(rows)))
def test_whitened_over_all_who_hold_a_part(rows: list[list[float]]) -> None:
    found = together([torch.tensor(row, dtype=torch.float64) for row in rows], advantages.whiten)
    expected = reference.normalized_actions(rows, [[True] * len(row) for row in rows], EPS)
    for row, other in zip(found, expected, strict=True):
        assert row.tolist() == pytest.approx(other, rel=1e-8, abs=1e-8)
    flat = [value for row in rows for value in row]
    for mean, variance in together([torch.tensor(row, dtype=torch.float64) for row in rows], advantages.moments):
        assert mean == pytest.approx(reference.mean_of(flat), abs=1e-12)
        assert variance == pytest.approx(reference.spread_of(flat) ** 2, abs=1e-12)


def draw_actions(lengths: list[int], seed: int) -> tuple[list[float], list[list[float]], list[list[float]], list[list[bool]]]:
    """Rewards of responses; log-probs or values of two kinds; masks."""
    rng = np.random.default_rng(seed)
    masks = [(rng.random(length) > 0.3).tolist() for length in lengths]
    first, second = ([rng.normal(-1, 1, length).tolist() for length in lengths] for _ in range(2))
    return rng.normal(0, 2, len(lengths)).tolist(), first, second, masks


RESPONSES = st.builds(draw_actions, st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 2**32 - 1))


def of_actions(rows: list[list[float]], masks: list[list[bool]]) -> Tensor:
    return torch.tensor([value for row, mask in zip(rows, masks, strict=True) for value, used in zip(row, mask, strict=True) if used],
                        dtype=torch.float64)


def numbers(masks: list[list[bool]]) -> Tensor:
    return torch.tensor([sum(mask) for mask in masks], dtype=torch.int64)


@given(drawn=RESPONSES, beta=st.sampled_from([0.0, 0.1, 2.0]))
def test_reinforce_pp(drawn: Any, beta: float) -> None:
    """Eqs. 8 to 10 by the functions that the trainer puts together: the reward last, less a penalty at every action, summed to the end."""
    rewards, old, other, masks = drawn
    penalties = beta * divergence("k1", of_actions(old, masks), of_actions(other, masks))
    with_penalty = values.outcome_rewards(torch.tensor(rewards, dtype=torch.float64), numbers(masks)) - penalties
    found = advantages.whiten(values.rewards_to_go(with_penalty, numbers(masks), 1.0))
    gaps = [[now - before for now, before in zip(*rows, strict=True)] for rows in zip(old, other, strict=True)]
    expected = reference.reinforce_pp(rewards, gaps, masks, beta, EPS)
    assert found.tolist() == pytest.approx(of_actions(expected, masks).tolist(), rel=1e-8, abs=1e-8)


@given(drawn=RESPONSES, beta=st.sampled_from([0.0, 0.3]), gamma=st.sampled_from([1.0, 0.9, 0.0]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_over_actions(drawn: Any, beta: float, gamma: float, lam: float) -> None:
    rewards, value_rows, gaps, masks = drawn
    reward_rows = [reference.with_penalty(reward, row, mask, beta) for reward, row, mask in zip(rewards, gaps, masks, strict=True)]
    found = values.gae(values.outcome_rewards(torch.tensor(rewards, dtype=torch.float64), numbers(masks)) - beta * of_actions(gaps, masks),
                       of_actions(value_rows, masks), numbers(masks), gamma, lam)
    for tensor, rows in zip(found, reference.gae(reward_rows, value_rows, masks, gamma, lam), strict=True):
        assert tensor.tolist() == pytest.approx(of_actions(rows, masks).tolist(), rel=1e-10, abs=1e-10)


@given(drawn=RESPONSES, gamma=st.sampled_from([1.0, 0.9, 0.0]))
def test_rewards_to_go(drawn: Any, gamma: float) -> None:
    """R_t = sum over k of gamma^k r_{t+k}: the advantages of GAE with lambda 1 and no values."""
    _, rows, _, masks = drawn
    nothing = [[0.0] * len(row) for row in rows]
    expected, _ = reference.gae(rows, nothing, masks, gamma, 1.0)
    found = values.rewards_to_go(of_actions(rows, masks), numbers(masks), gamma)
    assert found.tolist() == pytest.approx(of_actions(expected, masks).tolist(), rel=1e-10, abs=1e-10)


@given(drawn=RESPONSES, clip=st.sampled_from([0.0, 0.2]), garbage=st.sampled_from([0.0, math.nan, math.inf]))
def test_value_loss(drawn: Any, clip: float, garbage: float) -> None:
    """PPO as in OpenAI's baselines: half the larger of two squared errors, the second with the value kept within `clip` of the old one."""
    _, now, target, masks = drawn
    flat_masks = torch.tensor([used for mask in masks for used in mask])
    value, returns = (torch.where(flat_masks, torch.tensor([x for row in rows for x in row], dtype=torch.float64), garbage) for rows in (now, target))
    value.requires_grad_()
    loss, _ = values.clipped_value_loss(value, (value + 0.1 * returns).detach(), returns, flat_masks, normalizer=3.0, clip=clip)
    total = []
    for row, goals, mask in zip(now, target, masks, strict=True):
        for x, goal, used in zip(row, goals, mask, strict=True):
            old = x + 0.1 * goal
            near = min(max(x, old - clip), old + clip) if clip else x
            total += [max((x - goal) ** 2, (near - goal) ** 2) / 2] if used else []
    assert loss.item() == pytest.approx(math.fsum(total) / 3, rel=1e-10, abs=1e-12)
    [gradient] = torch.autograd.grad(loss, [value])
    assert gradient.isfinite().all()
    assert not gradient[~flat_masks].any()


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_gradcheck_of_the_value_loss(clip: float) -> None:
    value = torch.tensor([0.5, -0.4, 1.7, 0.1], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([0.45, 0.3, 0.2, 0.9], dtype=torch.float64), torch.tensor([1.0, 2.0, -1.0, 0.3], dtype=torch.float64)
    mask = torch.tensor([True, True, True, False])
    assert torch.autograd.gradcheck(lambda x: values.clipped_value_loss(x, old, returns, mask, normalizer=3.0, clip=clip)[0], (value,))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="one response"):
        advantages.leave_one_out(torch.ones(3, 1))
    with pytest.raises(ValueError, match="finite"):
        advantages.group_norm(torch.tensor([1.0, math.nan]))

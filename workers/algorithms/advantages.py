"""Rewards to advantages without a critic: of responses to one prompt, or of a whole batch. What a critic needs: values.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.algorithms.ratios import Add, alone

EPSILON = 1e-6


def group_norm(rewards: Tensor, eps: float = EPSILON) -> Tensor:
    """Normalise each group by its own mean and spread: (r - mean) / (std + eps).

    `rewards` is floating point [..., n], the last axis being the responses to one prompt; returns the same shape and
    dtype. The standard deviation is that of the population (divided by n). A group whose rewards are all equal says
    nothing about its responses and gets exact zeros. Source: GRPO (arXiv 2402.03300), section 4.1.2.
    Raises ValueError on an empty group or a reward that is not finite.
    """
    _check(rewards)
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    spread = rewards.std(dim=-1, correction=0, keepdim=True)
    return torch.where(_has_spread(rewards), centred / (spread + eps), torch.zeros_like(rewards))


def group_center(rewards: Tensor) -> Tensor:
    """r - mean of its group, whose spread is not divided by. Shapes, exact zeros and errors as `group_norm`. Source: Dr. GRPO (arXiv 2503.20783)."""
    _check(rewards)
    return torch.where(_has_spread(rewards), rewards - rewards.mean(dim=-1, keepdim=True), torch.zeros_like(rewards))


def leave_one_out(rewards: Tensor) -> Tensor:
    """r_i - the mean of the group's other rewards, which is n / (n - 1) (r_i - mean). Shapes, exact zeros and errors as `group_norm`; n is 2 or more.

    Source: RLOO (Kool et al., 2019; arXiv 2402.14740, section 2).
    """
    _check(rewards)
    number = rewards.shape[-1]
    if number < 2:
        raise ValueError("a group of one response has no other one to compare it with. Sample 2 or more responses to each prompt")
    return group_center(rewards) * (number / (number - 1))


def by_episode(estimator: Callable[[Tensor], Tensor], rewards: Tensor, episodes: Tensor) -> Tensor:
    """`estimator`, one of those above, for one group whose episodes may have several responses: an episode counts once, and its responses share
    its advantage.

    `rewards` floating point [n], equal within an episode; `episodes` int64 [n], each response's episode, ascending from 0 without a gap.
    Returns [n] of the rewards' dtype. Raises as the estimator, and ValueError where the shapes are not these.
    """
    if rewards.dim() != 1 or episodes.shape != rewards.shape:
        raise ValueError(f"episodes have shape {tuple(episodes.shape)} and rewards {tuple(rewards.shape)}: both must be [n]. "
                         "Give one for each response")
    return estimator(rewards[first_of_episodes(episodes)])[episodes]


def first_of_episodes(episodes: Tensor) -> Tensor:
    """Which responses are the first ones of their episodes: bool [n] from int64 [n], ascending."""
    return torch.cat([episodes.new_ones(1, dtype=torch.bool), episodes[1:] != episodes[:-1]])[: len(episodes)]


def batch_norm(rewards: Tensor, eps: float = EPSILON) -> Tensor:
    """Normalise over the whole batch: (r - mean) / (std + eps) with one mean and one spread.

    `rewards` is floating point of any shape, one for each episode; returns the same shape and dtype, exact zeros if all rewards are equal.
    Source: AReaL (arXiv 2505.24298), Table 3, advantages normalised over the batch.
    Raises ValueError on an empty batch or a reward that is not finite.
    """
    return group_norm(rewards.reshape(-1), eps).reshape(rewards.shape)


def moments(values: Tensor, add: Add = alone) -> tuple[float, float]:
    """Mean and variance (of the population) of `values` [N] and those of others: `add` adds sums over all who have some. 0 and 0 of nothing."""
    number, total = add(torch.stack([values.new_tensor(len(values), dtype=torch.float64), values.double().sum()])).tolist()
    mean = total / max(number, 1.0)
    [squares] = add((values.double() - mean).square().sum()[None]).tolist()
    return mean, squares / max(number, 1.0)


def whiten(values: Tensor, add: Add = alone, eps: float = EPSILON) -> Tensor:
    """(x - mean) / (std + eps) over all actions of a batch, [N] of `values`' dtype; `add` as for `moments`.

    Every action counts once. Source: PPO's implementations, and REINFORCE++ (arXiv 2501.03262, global advantage normalisation).
    """
    mean, variance = moments(values, add)
    return ((values.double() - mean) / (variance**0.5 + eps)).to(values.dtype)


def _has_spread(rewards: Tensor) -> Tensor:
    return rewards.amax(dim=-1, keepdim=True) > rewards.amin(dim=-1, keepdim=True)


def _check(rewards: Tensor) -> None:
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}: a group needs at least one response. Drop empty groups")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards have dtype {rewards.dtype}: they must be floating point. Convert them with .float()")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards hold {rewards[~torch.isfinite(rewards)][0].item()}: they must be finite. Check the verifier")

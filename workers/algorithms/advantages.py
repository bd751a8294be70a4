"""Rewards to advantages: one number per response, shared by all of its tokens (gamma = lambda = 1, no critic)."""

from __future__ import annotations

import torch
from torch import Tensor

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
    has_spread = rewards.amax(dim=-1, keepdim=True) > rewards.amin(dim=-1, keepdim=True)
    return torch.where(has_spread, centred / (spread + eps), torch.zeros_like(rewards))


def episode_norm(rewards: Tensor, episodes: Tensor, eps: float = EPSILON) -> Tensor:
    """`group_norm` of one group whose episodes may have several responses: each episode counts once, and its responses share its advantage.

    `rewards` floating point [n], equal within an episode; `episodes` int64 [n], each response's episode, ascending from 0 without a gap.
    Returns [n] of the rewards' dtype. Raises as `group_norm`.
    """
    if rewards.dim() != 1 or episodes.shape != rewards.shape:
        raise ValueError(f"episodes have shape {tuple(episodes.shape)} and rewards {tuple(rewards.shape)}: both must be [n]. "
                         "Give one for each response")
    firsts = torch.cat([episodes.new_ones(1, dtype=torch.bool), episodes[1:] != episodes[:-1]])[: len(episodes)]
    return group_norm(rewards[firsts], eps)[episodes]


def batch_norm(rewards: Tensor, eps: float = EPSILON) -> Tensor:
    """Normalise over the whole batch: (r - mean) / (std + eps) with one mean and one spread.

    `rewards` is floating point of any shape; returns the same shape and dtype, exact zeros if all rewards are equal.
    Source: AReaL (arXiv 2505.24298), Table 3, advantages normalised over the batch.
    Raises ValueError on an empty batch or a reward that is not finite.
    """
    return group_norm(rewards.reshape(-1), eps).reshape(rewards.shape)


def _check(rewards: Tensor) -> None:
    if rewards.dim() == 0 or rewards.shape[-1] == 0:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}: a group needs at least one response. Drop empty groups")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards have dtype {rewards.dtype}: they must be floating point. Convert them with .float()")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards hold {rewards[~torch.isfinite(rewards)][0].item()}: they must be finite. Check the verifier")

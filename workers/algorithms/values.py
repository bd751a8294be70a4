"""Rewards of single actions: their sums to the end of a response, generalised advantage estimation over them, and the loss of a critic's values.

n responses stand one after the other; `lengths` int64 [n] are their numbers of actions, which may be 0 and add up to N. Functions of these raise
ValueError where they do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.algorithms.loss_statistics import Stats


def outcome_rewards(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Rewards of actions [N], of which a response's last one gets its reward of `rewards` floating point [n], and the others nothing."""
    total = int(lengths.sum())
    if lengths.shape != rewards.shape:
        raise ValueError(f"{len(rewards)} rewards are for {len(lengths)} responses. Give a reward for every response")
    return torch.where(_following(lengths, total) == 0, torch.repeat_interleave(rewards, lengths), 0.0)


def rewards_to_go(rewards: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """R_t = sum_k gamma^k r_{t+k} to the end of each response: [N] of rewards of actions [N]. With r_t = -beta KL_t, and the response's reward at
    its end, these are the advantages of REINFORCE++ (arXiv 2501.03262) before they are normalised (`advantages.whiten`)."""
    return discounted_sums(rewards, _following(lengths, len(rewards)), gamma)


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the actions of n responses.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = sum_k (gamma lam)^k delta_{t+k}        R_t = A_t + V_t

    `rewards` floating point [N] are those of actions (`outcome_rewards`, less a penalty where there is one), `values` floating point [N] those of
    the states in which the actions were taken. Both results are [N], in the dtype of `values`. Source: GAE (arXiv 1506.02438), Eq. 16.
    """
    if len(rewards) != len(values):
        raise ValueError(f"{len(values)} values are for {len(rewards)} rewards of actions. Give both for every action")
    following = _following(lengths, len(values))
    deltas = rewards.to(values.dtype) + gamma * torch.where(following == 0, 0.0, values.roll(-1)) - values
    advantages = discounted_sums(deltas, following, gamma * lam)
    return advantages, advantages + values


def _following(lengths: Tensor, number: int) -> Tensor:
    """How many actions of the same response follow each action: int64 [N]."""
    if int(lengths.sum()) != number:
        raise ValueError(f"there are {number} numbers for {int(lengths.sum())} actions of {len(lengths)} responses. Give one for every action")
    return torch.repeat_interleave(lengths.cumsum(0), lengths) - 1 - torch.arange(number)


def discounted_sums(terms: Tensor, following: Tensor, discount: float) -> Tensor:
    """S_t = sum_k discount^k terms_{t+k}, k from 0 to `following`_t, int64 [N], which says how many terms are left in a sequence.

    A sum over 2s terms is made of two over s, so the longest sequence counts with its logarithm only.
    """
    sums, reach = terms, 1
    longest = int(following.amax()) if len(following) else 0
    while reach <= longest:
        ahead = torch.cat([sums[reach:], sums.new_zeros(reach)])
        sums = sums + discount**reach * torch.where(following >= reach, ahead, 0.0)
        reach *= 2
    return sums


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, normalizer: float, clip: float) -> tuple[Tensor, Stats]:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), summed over the tokens where `mask` is set and divided by `normalizer`.

    `values` (with gradient), `old_values` (those from before the step) and `returns` are floating point [N], `mask` bool [N]; c is `clip`,
    with 0 nothing is clipped. Returns the scalar loss and sums for `merge_stats`. Source: PPO as in OpenAI's baselines (ppo2).
    """
    zero = torch.zeros_like(values)
    value, old, target = (torch.where(mask, part, zero) for part in (values, old_values, returns))
    error = (value - target).square()
    if clip:
        error = torch.maximum(error, (value.clamp(old - clip, old + clip) - target).square())
    loss = 0.5 * error.sum() / normalizer
    return loss, {"loss": loss.detach()}

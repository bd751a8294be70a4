"""What a critic needs: generalised advantage estimation over the tokens of responses, and the loss of its values."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.algorithms.losses import Stats


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of the actions of n responses, which stand one after the other.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = sum_k (gamma lam)^k delta_{t+k}        R_t = A_t + V_t

    `rewards` floating point [n] come with a response's last action, `values` floating point [N] are those of the states in which the
    actions were taken, `lengths` int64 [n] the numbers of actions, which may be 0. Both results are [N], in the dtype of `values`. Source:
    GAE (arXiv 1506.02438), Eq. 16. Raises ValueError where the lengths do not add up to N.
    """
    if lengths.shape != rewards.shape or int(lengths.sum()) != len(values):
        raise ValueError(f"{len(values)} values are for {int(lengths.sum())} actions of {len(lengths)} responses, with {len(rewards)} rewards. "
                         "Give a value for every action and a reward for every response")
    following = torch.repeat_interleave(lengths.cumsum(0), lengths) - 1 - torch.arange(len(values))
    last = following == 0
    reward = torch.where(last, torch.repeat_interleave(rewards.to(values.dtype), lengths), 0.0)
    deltas = reward + gamma * torch.where(last, 0.0, values.roll(-1)) - values
    advantages = discounted_sums(deltas, following, gamma * lam)
    return advantages, advantages + values


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

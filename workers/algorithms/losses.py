"""Decoupled PPO (AReaL, arXiv 2505.24298, Eq. 5) as a sum over tokens, with statistics that add up.

Three policies meet in the objective: the behaviour policy sampled the tokens (possibly several versions in one
response; the per-token log-probs recorded at sampling time are all that is needed, Proposition 1), the proximal policy
centres the trust region, and the current policy is being trained:

    J = sum_t  w_t * min(u_t A_t, clip(u_t, 1 - eps, 1 + eps) A_t),   w = pi_prox / pi_behav,   u = pi / pi_prox

The loss is returned as a plain sum over a minibatch's share, already divided by the normaliser that the caller gives
(the valid tokens of the whole minibatch), so micro-batches only have to be added, whatever their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of a larger difference says no more than "impossible" and would overflow the sums

Stats = dict[str, Tensor | float]


def decoupled_ppo_loss(
    current_logprobs: Tensor,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    normalizer: float,
    clip_epsilon: float = 0.2,
    behavior_cap: float = 5.0,
    clamp: bool = False,
    decoupled: bool = True,
) -> tuple[Tensor, Stats]:
    """Minus Eq. 5, summed over the tokens where `mask` is set and divided by `normalizer`.

    `current_logprobs` (with gradient), `proximal_logprobs`, `behavior_logprobs` and `advantages` are floating point [N],
    `mask` is bool [N]. A behaviour weight above `behavior_cap` drops its token (or is clamped to the cap with `clamp`);
    dropped tokens stay in the denominator. With `decoupled=False` this is plain PPO: the proximal policy is the
    behaviour policy and w = 1. Returns the scalar loss and sums for `merge_stats`. What the mask leaves out contributes
    exactly zero, whatever values stand there.
    """
    zero = torch.zeros_like(current_logprobs)
    current = torch.where(mask, current_logprobs, zero)
    behavior = torch.where(mask, behavior_logprobs, zero)
    proximal = torch.where(mask, proximal_logprobs, zero) if decoupled else behavior
    advantage = torch.where(mask, advantages, zero)
    raw_weight = (proximal - behavior).clamp(max=MAX_LOG_RATIO).exp()
    capped = raw_weight > behavior_cap
    weight = torch.where(capped, behavior_cap * torch.ones_like(zero) if clamp else zero, raw_weight)
    ratio = (current - proximal).clamp(max=MAX_LOG_RATIO).exp()
    clipped_ratio = ratio.clamp(1 - clip_epsilon, 1 + clip_epsilon)
    unclipped, clipped = ratio * advantage, clipped_ratio * advantage
    token_loss = torch.where(mask, -weight * torch.minimum(unclipped, clipped), zero)
    loss = token_loss.sum() / normalizer
    with torch.no_grad():
        stats = {
            "loss": loss.detach(),
            "clipped": ((clipped < unclipped) & mask).sum(),
            "capped": (capped & mask).sum(),
            **_weight_sums(raw_weight, mask),
            **_gap_sums(current.detach(), proximal, behavior),
        }
    return loss, stats


def reference_kl(current_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, *, normalizer: float) -> tuple[Tensor, Stats]:
    """The estimate exp(r) - r - 1, r = log pi_ref - log pi, of KL(pi, pi_ref): its sum over the tokens where `mask` is set over `normalizer`.

    `current_logprobs` (with gradient) and `reference_logprobs` are floating point [N], `mask` is bool [N]. It is never negative, and without
    bias for tokens of the current policy. Returns the scalar and sums for `merge_stats`. Source: k3 of Schulman, "Approximating KL
    divergence" (2020), as in GRPO (arXiv 2402.03300), Eq. 4. A token with r above `MAX_LOG_RATIO` has no gradient.
    """
    log_ratio = torch.where(mask, reference_logprobs - current_logprobs, 0.0).clamp(max=MAX_LOG_RATIO)
    total = (log_ratio.expm1() - log_ratio).sum()
    return total / normalizer, {"kl_reference": total.detach()}


def _weight_sums(weight: Tensor, mask: Tensor) -> Stats:
    weight = weight * mask
    return {"tokens": mask.sum(), "weight": weight.sum(), "weight_squared": weight.square().sum(),
            "max_weight": torch.cat([weight, weight.new_zeros(1)]).max()}


def _gap_sums(current: Tensor, proximal: Tensor, behavior: Tensor) -> Stats:
    """Sums of |differences| and of k1 = log pi_old - log pi, all zero where the mask has made the inputs equal."""
    return {
        "gap_proximal_behavior": (proximal - behavior).abs().sum(),
        "gap_current_proximal": (current - proximal).abs().sum(),
        "gap_current_behavior": (current - behavior).abs().sum(),
        "kl_proximal": (proximal - current).sum(),
        "kl_behavior": (behavior - current).sum(),
    }


def merge_stats(parts: Sequence[Mapping[str, Tensor | float]]) -> dict[str, float]:
    """Add the statistics of micro-batches (of one or several minibatches), whose tensors are on one device; what starts with `max_` takes
    the maximum."""
    merged: dict[str, float] = {}
    items = [item for part in parts for item in part.items()]
    # One transfer for all of them: a float() each would wait for the device each time.
    tensors = [value.double() for _, value in items if isinstance(value, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else [])
    for name, given in items:
        value = next(moved) if isinstance(given, Tensor) else given
        merged[name] = max(merged.get(name, float("-inf")), value) if name.startswith("max_") else merged.get(name, 0.0) + value
    return merged


def summarize(stats: dict[str, float]) -> dict[str, float]:
    """Metrics of merged statistics: means over valid tokens, shares in [0, 1], effective sample size in (0, 1].

    `behavior_ess` is (sum w)^2 / (n sum w^2). `kl_proximal` and `kl_behavior` are the k1 estimates, mean of log pi_old - log pi on sampled
    tokens; `kl_reference`, where there is one, is the mean of `reference_kl`.
    """
    tokens = max(stats["tokens"], 1.0)
    squares = stats["weight_squared"]
    metrics = {
        "behavior_weight_mean": stats["weight"] / tokens,
        "behavior_weight_max": stats["max_weight"],
        "behavior_ess": min(1.0, stats["weight"] ** 2 / (tokens * squares)) if squares > 0 else 0.0,  # rounding may pass 1
        "behavior_masked_share": stats["capped"] / tokens,
        "clip_share": stats["clipped"] / tokens,
    }
    for name in ("gap_proximal_behavior", "gap_current_proximal", "gap_current_behavior", "kl_proximal", "kl_behavior", "kl_reference"):
        if name in stats:
            metrics[name] = stats[name] / tokens
    return metrics

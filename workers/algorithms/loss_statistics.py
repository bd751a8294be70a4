"""Statistics of micro-batches, as sums over tokens that add up over micro-batches and ranks, and the metrics that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Stats = dict[str, Tensor | float]
DISTANCES = [2.0 ** (half / 2 - 7) for half in range(23)]
"""Nats, from 1/128 to 16: where tokens are counted for percentiles of the gap."""


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


def weight_sums(weight: Tensor, mask: Tensor) -> Stats:
    """Sums of behaviour weights [N] before they are bounded, over the tokens where `mask` is set."""
    weight = torch.where(mask, weight, 0.0)
    return {"tokens": mask.sum(), "weight": weight.sum(), "weight_squared": weight.square().sum(),
            "max_weight": torch.cat([weight, weight.new_zeros(1)]).max()}


def gap_sums(current: Tensor, proximal: Tensor, behavior: Tensor) -> Stats:
    """Sums of |differences| and of k1 = log pi_old - log pi of log-probs [N], all zero where the mask has made the inputs equal."""
    return {
        "gap_current_proximal": (current - proximal).abs().sum(),
        "gap_current_behavior": (current - behavior).abs().sum(),
        "kl_proximal": (proximal - current).sum(),
        "kl_behavior": (behavior - current).sum(),
    }


def divergence_sums(before: Tensor, behavior: Tensor, mask: Tensor) -> Stats:
    """How far the policies that sampled lie from that of `before` the step, by log-probs [N] where `mask` is set: of how many tokens, the sum of
    |differences|, and how many of these are above each of `DISTANCES`."""
    gap = torch.where(mask, before - behavior, 0.0).abs()
    distances = torch.exp2(torch.arange(len(DISTANCES), dtype=gap.dtype, device=gap.device) / 2 - 7)  # made there: a copy would wait for the device
    counts = (gap.unsqueeze(1) > distances).sum(0).unbind()
    stats: Stats = {"gap_tokens": mask.sum(), "gap_proximal_behavior": gap.sum()}
    return stats | {f"gap_above_{distance:g}": count for distance, count in zip(DISTANCES, counts, strict=True)}


def gap_percentile(stats: Mapping[str, float], share: float) -> float:
    """The distance that `share` of the tokens lie below, in nats: between two of `DISTANCES` by the logarithm, 0 below the smallest."""
    beyond = (1 - share) * max(stats["gap_tokens"], 1.0)
    counts = [stats[f"gap_above_{distance:g}"] for distance in DISTANCES]
    at = next((number for number, count in enumerate(counts) if count <= beyond), len(DISTANCES) - 1)
    if at == 0 or counts[at] > beyond:
        return DISTANCES[at] if at else 0.0
    part = (counts[at - 1] - beyond) / (counts[at - 1] - counts[at])
    return DISTANCES[at - 1] * (DISTANCES[at] / DISTANCES[at - 1]) ** part


def summarize(stats: dict[str, float]) -> dict[str, float]:
    """Metrics of merged statistics: means over valid tokens, shares in [0, 1], effective sample size in (0, 1], 0 without weights.

    `behavior_ess` is (sum w)^2 / (n sum w^2). `kl_proximal` and `kl_behavior` are the k1 estimates, mean of log pi_old - log pi on sampled
    tokens; `kl_reference`, where there is one, is the mean of k3. `gap_proximal_behavior` and its 99th percentile are of the policy before the
    step, whatever the objective: over all tokens, or, where only the first minibatch knows that policy, over those of that one.
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
    for name in ("gap_current_proximal", "gap_current_behavior", "kl_proximal", "kl_behavior", "kl_reference"):
        if name in stats:
            metrics[name] = stats[name] / tokens
    if stats.get("gap_tokens"):
        metrics["gap_proximal_behavior"] = stats["gap_proximal_behavior"] / stats["gap_tokens"]
        metrics["gap_proximal_behavior_p99"] = gap_percentile(stats, 0.99)
    return metrics

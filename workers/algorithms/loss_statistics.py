"""Statistics of micro-batches, as sums over tokens that add up over micro-batches and ranks, and the metrics that are made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Stats = dict[str, Tensor | float]


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
        "gap_proximal_behavior": (proximal - behavior).abs().sum(),
        "gap_current_proximal": (current - proximal).abs().sum(),
        "gap_current_behavior": (current - behavior).abs().sum(),
        "kl_proximal": (proximal - current).sum(),
        "kl_behavior": (behavior - current).sum(),
    }


def summarize(stats: dict[str, float]) -> dict[str, float]:
    """Metrics of merged statistics: means over valid tokens, shares in [0, 1], effective sample size in (0, 1].

    `behavior_ess` is (sum w)^2 / (n sum w^2). `kl_proximal` and `kl_behavior` are the k1 estimates, mean of log pi_old - log pi on sampled
    tokens; `kl_reference`, where there is one, is the mean of k3.
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

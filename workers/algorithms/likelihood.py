"""The objective of supervised fine-tuning: the likelihood of given responses, as a sum over tokens, with statistics that add up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.algorithms.loss_statistics import Stats

MAX_LOSS = 700.0  # exp() of more is no float


def negative_log_likelihood(logprobs: Tensor, mask: Tensor, *, normalizer: float) -> tuple[Tensor, Stats]:
    """Minus the sum of `logprobs`, floating point [N] with gradient, over the tokens where `mask`, bool [N], is set, divided by `normalizer`.

    The caller gives the tokens that count in the whole minibatch as `normalizer`: micro-batches then add up to the mean over tokens, the
    cross-entropy of Hugging Face's models with the prompt's labels ignored. Returns the scalar and sums for `loss_statistics.merge_stats`.
    """
    total = -torch.where(mask, logprobs, 0.0).sum()
    loss = total / normalizer
    return loss, {"loss": loss.detach(), "nats": total.detach(), "tokens": mask.sum()}


def summarize(stats: dict[str, float]) -> dict[str, float]:
    """Metrics of merged statistics: loss (nats per token) and perplexity, exp(loss)."""
    loss = stats["nats"] / max(stats["tokens"], 1.0)
    return {"loss": loss, "perplexity": math.exp(min(loss, MAX_LOSS))}

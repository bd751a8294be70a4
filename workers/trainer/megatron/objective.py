"""One micro-batch's share of the training loss, and statistics that add up over micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.algorithms.losses import Stats, decoupled_ppo_loss, merge_stats
from workers.config import OffPolicy
from workers.config.training import AlgorithmConfig
from workers.trainer.batch import TrainGroup
from workers.trainer.layout import PackedBatch
from workers.trainer.megatron import process_group

TokenValues = list[list[np.ndarray]]  # float32, by group, response, token


def microbatch_loss(batch: PackedBatch, output: Tensor, *, groups: list[TrainGroup], proximal: TokenValues | None,
                    advantages: list[np.ndarray], normalizer: float, algorithm: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """The loss of the tokens in `batch`, divided by the whole minibatch's `normalizer`, and their statistics.

    `output` float32 [2, N] holds log-probs (with gradient) and entropies. Without `proximal` log-probs the current ones
    take their place, which is exact where the weights have not moved since.
    """
    device = output.device
    current, entropy = output[0], output[1].detach()
    behavior = batch.gather(lambda group, sample: groups[group].behavior_logprobs[sample]).to(device)
    mask = batch.gather(lambda group, sample: groups[group].loss_mask[sample]).to(device)
    lengths = torch.tensor(batch.sample_lengths)
    advantage = torch.tensor([float(advantages[group][sample]) for group, sample in batch.samples]).repeat_interleave(lengths)
    if proximal is None or not algorithm.decoupled:
        centre = current.detach()
    else:
        centre = batch.gather(lambda group, sample: proximal[group][sample]).to(device)
    loss, stats = decoupled_ppo_loss(
        current, centre, behavior, advantage.to(device), mask, normalizer=normalizer,
        clip_epsilon=algorithm.clip_epsilon, behavior_cap=algorithm.behavior_cap,
        clamp=algorithm.off_policy is OffPolicy.clamp, decoupled=algorithm.decoupled)
    return loss, stats | _own_stats(torch.where(mask, entropy, 0.0).sum(), len(batch.tokens), 1)


def merge_over_ranks(parts: list[Stats]) -> dict[str, float]:
    """`merge_stats` of this rank's micro-batches (none is fine) and those of all other ranks, the same on all of them."""
    merged = merge_stats([_neutral_stats(), *parts])
    highest = [name for name in merged if name.startswith("max_")]
    added = [name for name in merged if not name.startswith("max_")]
    sums = process_group.sum_over_ranks(np.array([merged[name] for name in added]))
    maxima = process_group.max_over_ranks(np.array([merged[name] for name in highest]))
    return dict(zip(added + highest, [*sums.tolist(), *maxima.tolist()], strict=True))


def add_totals(parts: list[dict[str, float]]) -> dict[str, float]:
    """Add what `merge_over_ranks` gave for several minibatches; what starts with `max_` takes the maximum."""
    return {name: max(part[name] for part in parts) if name.startswith("max_") else sum(part[name] for part in parts) for name in parts[0]}


def _own_stats(entropy: Tensor, packed_tokens: int, microbatches: int) -> Stats:
    return {"entropy": entropy, "packed_tokens": torch.tensor(packed_tokens), "microbatches": torch.tensor(microbatches)}


def _neutral_stats() -> Stats:
    """Statistics of no tokens: all names, with zeros. A masked token contributes exactly nothing."""
    zero = torch.zeros(1)
    _, stats = decoupled_ppo_loss(zero, zero, zero, zero, torch.zeros(1, dtype=torch.bool), normalizer=1.0)
    return stats | _own_stats(torch.zeros(()), 0, 0)

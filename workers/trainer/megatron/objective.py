"""One micro-batch's share of the training loss, and statistics that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.algorithms.agreement import agreement
from workers.algorithms.likelihood import negative_log_likelihood
from workers.algorithms.losses import Stats, decoupled_ppo_loss, merge_stats, reference_kl
from workers.algorithms.proximal import loglinear_logprobs
from workers.config import OffPolicy
from workers.config.training import AlgorithmConfig
from workers.trainer.batch import TrainGroup, check_per_response
from workers.trainer.context import RankPart
from workers.trainer.layout import PackedBatch
from workers.trainer.megatron import collectives, process_group

TokenValues = list[list[np.ndarray]]  # float32, by group, response, token
TokenMasks = list[list[np.ndarray]]  # bool, likewise
Advantages = Sequence[np.ndarray | list[np.ndarray]]  # float32, by group: one for each response [n], or one for each of its tokens


@dataclass(frozen=True)
class PolicyTargets:
    """What the policy's loss is made of besides the groups, by group, response and token.

    Without `proximal` log-probs the current ones of a training pass take their place, which is exact where the weights have not moved yet;
    where they have, `version`, the one before the step, has them interpolated (loglinear_logprobs). `reference`: see `reference_kl`.
    `fresh`: the tokens that the weights from before the step have sampled, where `proximal` or the pass itself has these weights' log-probs.
    """

    advantages: TokenValues
    reference: TokenValues | None = None
    proximal: TokenValues | None = None
    version: int | None = None
    fresh: TokenMasks | None = None

    def have_gradient(self, group: int) -> bool:
        """Whether the loss of the group at `group` moves the policy at all."""
        return self.reference is not None or any(np.any(row) for row in self.advantages[group])


def microbatch_loss(batch: PackedBatch, part: RankPart, output: Tensor, *, groups: list[TrainGroup], targets: PolicyTargets,
                    normalizer: float, algorithm: AlgorithmConfig) -> tuple[Tensor, Stats]:
    """The loss of this rank's `part` of the tokens in `batch`, divided by the whole minibatch's `normalizer`, and their statistics.

    `output` float32 [2, n] holds log-probs (with gradient) and entropies.
    """
    def own(value: Callable[[int, int], np.ndarray]) -> Tensor:
        return own_tokens(batch, part, value, output.device)

    current, entropy = output[0], output[1].detach()
    behavior = own(lambda group, sample: groups[group].behavior_logprobs[sample])
    mask = own(lambda group, sample: groups[group].loss_mask[sample]).bool()
    advantage = own(lambda group, sample: targets.advantages[group][sample])
    proximal, reference = targets.proximal, targets.reference
    if proximal is not None:
        centre = own(lambda group, sample: proximal[group][sample])
    elif targets.version is not None:
        centre = loglinear_logprobs(current, behavior, own(lambda group, sample: groups[group].versions[sample]), targets.version)
    else:
        centre = current.detach()
    loss, stats = decoupled_ppo_loss(
        current, centre, behavior, advantage, mask, normalizer=normalizer,
        clip_epsilon=algorithm.clip_epsilon, behavior_cap=algorithm.behavior_cap,
        clamp=algorithm.off_policy is OffPolicy.clamp, decoupled=algorithm.decoupled)
    if reference is not None:
        divergence, more = reference_kl(current, own(lambda group, sample: reference[group][sample]), mask, normalizer=normalizer)
        loss = loss + algorithm.kl_weight * divergence
        stats |= more | {"loss": loss.detach()}
    fresh = targets.fresh
    compared = torch.zeros_like(mask) if fresh is None else mask & own(lambda group, sample: fresh[group][sample]).bool()
    stats |= agreement(current.detach() if proximal is None else centre, behavior, compared)
    return loss, stats | _own_stats(torch.where(mask, entropy, 0.0).sum(), _share(batch.num_real, part, batch), _share(1, part, batch))


def supervised_loss(batch: PackedBatch, part: RankPart, output: Tensor, *, groups: list[TrainGroup], normalizer: float) -> tuple[Tensor, Stats]:
    """As `microbatch_loss`, for groups whose responses are to be learnt as they are."""
    mask = own_tokens(batch, part, lambda group, sample: groups[group].loss_mask[sample], output.device).bool()
    loss, stats = negative_log_likelihood(output[0], mask, normalizer=normalizer)
    entropy = torch.where(mask, output[1].detach(), 0.0).sum()
    return loss, stats | _own_stats(entropy, _share(batch.num_real, part, batch), _share(1, part, batch))


def own_tokens(batch: PackedBatch, part: RankPart, value: Callable[[int, int], np.ndarray], device: torch.device) -> Tensor:
    """What `value(group, sample)`, arrays aligned with the responses, holds for the n tokens that `part` predicts: a tensor [n] on `device`."""
    return batch.gather(value)[part.selected].to(device, non_blocking=True)


def per_token(advantages: Advantages, groups: list[TrainGroup]) -> TokenValues:
    """`advantages` of responses, or of tokens, for every token. Raises ValueError where they do not fit `groups` or are not finite."""
    if len(advantages) != len(groups):
        raise ValueError(f"advantages are for {len(advantages)} groups, the batch has {len(groups)}. Give one array for each group")
    spread: TokenValues = []
    for group, values in zip(groups, advantages, strict=True):
        if isinstance(values, np.ndarray):
            if values.shape != (group.num_samples,) or not np.isfinite(values).all():
                raise ValueError(f"group {group.group_id}: advantages {values.tolist()} must be {group.num_samples} finite numbers. "
                                 "Compute them with workers.algorithms.advantages")
            values = [np.broadcast_to(value, len(response)) for value, response in zip(values.astype(np.float32), group.responses, strict=True)]
        spread.append(values)
    check_per_response("advantages", spread, groups)
    return spread


def _share(number: int, part: RankPart, batch: PackedBatch) -> float:
    """This rank's share of a micro-batch's number: ranks of a context-parallel group have the same number of its tokens."""
    return number * len(part.rows) / len(batch.tokens)


def merge_over_ranks(parts: list[Stats], none: Stats) -> dict[str, float]:
    """`merge_stats` of this rank's micro-batches (there may be none) and those of all other ranks, the same on all of them.

    `none` are the statistics of no tokens, with all names.
    """
    merged = merge_stats([merge_stats([none]), merge_stats(parts if process_group.values_count() else [])])
    highest = [name for name in merged if name.startswith("max_")]
    added = [name for name in merged if not name.startswith("max_")]
    sums = collectives.sum_over_ranks(np.array([merged[name] for name in added]))
    maxima = collectives.max_over_ranks(np.array([merged[name] for name in highest]))
    return dict(zip(added + highest, [*sums.tolist(), *maxima.tolist()], strict=True))


def add_totals(parts: list[dict[str, float]]) -> dict[str, float]:
    """Add what `merge_over_ranks` gave for several minibatches; what starts with `max_` takes the maximum."""
    return {name: max(part[name] for part in parts) if name.startswith("max_") else sum(part[name] for part in parts) for name in parts[0]}


def _own_stats(entropy: Tensor, packed_tokens: float, microbatches: float) -> Stats:
    return {"entropy": entropy, "packed_tokens": packed_tokens, "microbatches": microbatches}


def no_stats(algorithm: AlgorithmConfig, supervised: bool = False) -> Stats:
    """Statistics of no tokens: all names, with zeros. A masked token contributes exactly nothing."""
    zero, mask = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    if supervised:
        return negative_log_likelihood(zero, mask, normalizer=1.0)[1] | _own_stats(torch.zeros(()), 0, 0)
    stats = decoupled_ppo_loss(zero, zero, zero, zero, mask, normalizer=1.0)[1] | agreement(zero, zero, mask)
    if algorithm.kl_weight:
        stats |= reference_kl(zero, zero, mask, normalizer=1.0)[1]
    return stats | _own_stats(torch.zeros(()), 0, 0)

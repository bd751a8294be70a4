"""One micro-batch's share of the training loss, and statistics that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.algorithms.aggregation import normalizer
from workers.algorithms.agreement import agreement
from workers.algorithms.likelihood import negative_log_likelihood
from workers.algorithms.loss_statistics import Stats, divergence_sums, merge_stats
from workers.algorithms.policy_loss import Objective, TokenInputs, policy_loss
from workers.algorithms.proximal import loglinear_logprobs
from workers.algorithms.ratios import Responses
from workers.config import Aggregation, AlgorithmConfig, Config, KlPlace, OffPolicy
from workers.trainer.batch.context_parallel import RankPart
from workers.trainer.batch.group import TrainGroup, check_per_response
from workers.trainer.batch.sequence_layout import PackedBatch
from workers.trainer.megatron.parallel import collectives, cpu_backend, process_group

TokenValues = list[list[np.ndarray]]  # float32, by group, response, token
TokenMasks = list[list[np.ndarray]]  # bool, likewise
Advantages = Sequence[np.ndarray | list[np.ndarray]]  # float32, by group: one for each response [n], or one for each of its tokens


@dataclass(frozen=True)
class PolicyTargets:
    """What the policy's loss is made of besides the groups, by group, response and token.

    Without `proximal` log-probs the current ones of a training pass take their place, which is exact where the weights have not moved yet;
    where they have, `version`, the one before the step, has them interpolated (loglinear_logprobs). `reference`: the reference model's log-probs.
    `fresh`: the tokens that the weights from before the step have sampled, where `proximal` or the pass itself has these weights' log-probs.
    `kept`: the tokens that the second moment leaves (None: all). `moved`: the weights have moved since, and `proximal` is not there: nothing is
    known of the policy before the step any more.
    """

    advantages: TokenValues
    reference: TokenValues | None = None
    proximal: TokenValues | None = None
    version: int | None = None
    fresh: TokenMasks | None = None
    kept: TokenMasks | None = None
    moved: bool = False

    def have_gradient(self, group: int) -> bool:
        """Whether the group at `group` has any advantage."""
        return any(np.any(row) for row in self.advantages[group])


def objective_of(algorithm: AlgorithmConfig) -> Objective:
    """The choices of `algorithm` that are made within the loss."""
    by_moment = algorithm.off_policy is OffPolicy.second_moment
    return Objective(
        decoupled=algorithm.decoupled, ratio=algorithm.ratio.value, surrogate=algorithm.surrogate.value,
        clip_low=algorithm.clip_epsilon, clip_high=algorithm.clip_epsilon_high or algorithm.clip_epsilon, dual_clip=algorithm.dual_clip,
        tau_positive=algorithm.sapo_tau_positive, tau_negative=algorithm.sapo_tau_negative,
        weight_level=algorithm.behavior_level.value, weight_low=algorithm.behavior_floor,
        weight_high=float("inf") if by_moment else algorithm.behavior_cap, clamp_weights=algorithm.off_policy is OffPolicy.clamp,
        kl_weight=algorithm.kl_weight if algorithm.kl_in is KlPlace.loss else 0.0, kl_estimator=algorithm.kl_estimator.value,
        entropy_weight=algorithm.entropy_weight, aggregation=algorithm.aggregation.value)


def microbatch_loss(batch: PackedBatch, part: RankPart, output: Tensor, *, groups: list[TrainGroup], targets: PolicyTargets,
                    normalizer: float, objective: Objective) -> tuple[Tensor, Stats]:
    """The loss of this rank's `part` of the tokens in `batch`, divided by the whole minibatch's `normalizer`, and their statistics.

    `output` float32 [2, n] holds log-probs (with gradient) and entropies. The ranks that share the tokens of a micro-batch call this together.
    """
    def own(values: TokenValues) -> Tensor:
        return own_tokens(batch, part, lambda group, sample: values[group][sample], output.device)

    current, entropy = output[0], output[1]
    behavior = own_tokens(batch, part, lambda group, sample: groups[group].behavior_logprobs[sample], output.device)
    mask = own_tokens(batch, part, lambda group, sample: groups[group].loss_mask[sample], output.device).bool()
    if targets.proximal is not None:
        centre = own(targets.proximal)
    elif targets.version is not None:
        versions = own_tokens(batch, part, lambda group, sample: groups[group].versions[sample], output.device)
        centre = loglinear_logprobs(current, behavior, versions, targets.version)
    else:
        centre = current.detach()
    loss, stats = policy_loss(TokenInputs(
        current, centre, behavior, own(targets.advantages), mask,
        reference=None if targets.reference is None else own(targets.reference), entropy=entropy,
        kept=None if targets.kept is None else own(targets.kept).bool(),
        responses=_responses(batch, part, groups, output.device)), objective, normalizer=normalizer)
    compared = torch.zeros_like(mask) if targets.fresh is None else mask & own(targets.fresh).bool()
    before = current.detach() if targets.proximal is None else centre
    stats |= agreement(before, behavior, compared) | divergence_sums(before, behavior, torch.zeros_like(mask) if targets.moved else mask)
    total = torch.where(mask, entropy.detach(), 0.0).sum()
    return loss, stats | _own_stats(total, _share(batch.num_real, part, batch), _share(1, part, batch))


def _responses(batch: PackedBatch, part: RankPart, groups: list[TrainGroup], device: torch.device) -> Responses:
    """Which response each of this rank's tokens is of. A response lies in one micro-batch, whose tokens the context-parallel ranks share."""
    index = torch.repeat_interleave(torch.arange(len(batch.samples)), torch.tensor(batch.sample_lengths, dtype=torch.int64))[part.selected]
    lengths = torch.tensor([float(groups[group].loss_mask[sample].sum()) for group, sample in batch.samples])
    return Responses(cpu_backend.upload(index, device), cpu_backend.upload(lengths, device), _over_context)


def _over_context(partial: Tensor) -> Tensor:
    """The sum over the ranks that share a micro-batch's tokens."""
    if parallel_state.get_context_parallel_world_size() > 1 and partial.numel():
        dist.all_reduce(partial, group=parallel_state.get_context_parallel_group())
    return partial


def policy_normalizers(groups: list[TrainGroup], minibatches: list[list[int]], config: Config) -> tuple[list[float], list[float]]:
    """What the policy's and the critic's sums over the tokens of each minibatch are divided by, the same on all ranks, which call this together."""
    rows = [[mask.sum() for index in part for mask in groups[index].loss_mask] for part in minibatches]
    counts = collectives.sum_over_copies(np.array([[sum(row), np.count_nonzero(row)] for row in rows], np.int64))
    algorithm = config.algorithm
    length = algorithm.aggregation_length or config.workflow.max_new_tokens
    kind = Aggregation.token_mean if config.supervised else algorithm.aggregation
    return ([normalizer(kind.value, int(tokens), int(responses), length) for tokens, responses in counts],
            [normalizer("token_mean", int(tokens), int(responses), length) for tokens, responses in counts])


def supervised_loss(batch: PackedBatch, part: RankPart, output: Tensor, *, groups: list[TrainGroup], normalizer: float) -> tuple[Tensor, Stats]:
    """As `microbatch_loss`, for groups whose responses are to be learnt as they are."""
    mask = own_tokens(batch, part, lambda group, sample: groups[group].loss_mask[sample], output.device).bool()
    loss, stats = negative_log_likelihood(output[0], mask, normalizer=normalizer)
    entropy = torch.where(mask, output[1].detach(), 0.0).sum()
    return loss, stats | _own_stats(entropy, _share(batch.num_real, part, batch), _share(1, part, batch))


def own_tokens(batch: PackedBatch, part: RankPart, value: Callable[[int, int], np.ndarray], device: torch.device) -> Tensor:
    """What `value(group, sample)`, arrays aligned with the responses, holds for the n tokens that `part` predicts: a tensor [n] on `device`."""
    return cpu_backend.upload(batch.gather(value)[part.selected], device)


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


def no_stats(objective: Objective, with_reference: bool) -> Stats:
    """The policy's statistics of no tokens: all names, with zeros. A masked token contributes exactly nothing."""
    zero, mask = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    nowhere = Responses(torch.zeros(1, dtype=torch.int64), zero)
    inputs = TokenInputs(zero, zero, zero, zero, mask, reference=zero if with_reference else None, entropy=zero, responses=nowhere)
    stats = policy_loss(inputs, objective, normalizer=1.0)[1] | agreement(zero, zero, mask) | divergence_sums(zero, zero, mask)
    return stats | _own_stats(torch.zeros(()), 0, 0)


def no_supervised_stats() -> Stats:
    """As `no_stats`, for `supervised_loss`."""
    zero, mask = torch.zeros(1), torch.zeros(1, dtype=torch.bool)
    return negative_log_likelihood(zero, mask, normalizer=1.0)[1] | _own_stats(torch.zeros(()), 0, 0)

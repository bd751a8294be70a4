"""Passing groups through the model: this rank's share of them, packed into micro-batches, on Megatron's schedule.

    groups at indices --layout.py, packing.py--> chunks --divided by tokens--> this rank's --> micro-batches
        |
        v  plan_attention: indices, masks, rotary angles            once per micro-batch, shared by all layers
    Megatron forward_backward_func
        |   PackedGPTModel -> log-probs, entropies [2, N]           logits only where a response token is predicted
        v
    loss(batch, output) -> loss, statistics                         of this rank's share; gradients add up in its buffer

Every rank is given the same groups, so all know the whole division without a word. Gradients are not reduced here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from workers.algorithms.losses import Stats
from workers.config.training import TrainerConfig
from workers.trainer.batch import TrainGroup
from workers.trainer.layout import PackedBatch, pack_groups
from workers.trainer.megatron import cpu_backend, process_group
from workers.trainer.megatron.objective import TokenValues
from workers.trainer.megatron.packed_attention import PackedLayoutParams, plan_attention
from workers.trainer.megatron.stop import StopGate, StopNoticed

LossFunction = Callable[[PackedBatch, Tensor], tuple[Tensor, Stats]]


class PackedPasses:
    """Forward and backward passes through `model` (Megatron's data-parallel wrapper)."""

    def __init__(self, model: Any, trainer: TrainerConfig, inverse_frequencies: Tensor) -> None:
        self._model, self._trainer, self._inverse_frequencies = model, trainer, inverse_frequencies
        self._device = cpu_backend.device()

    def run(self, groups: list[TrainGroup], indices: list[int], loss: LossFunction, forward_only: bool, gate: StopGate) -> list[Stats]:
        """Pass this rank's share of the groups at `indices`; returns what `loss` gave besides the loss, by micro-batch.

        Gradients come out multiplied by the number of ranks, by which Megatron divides when it adds them up. Where the
        gate lets no more micro-batches through, the rest is left out: ask it afterwards.
        """
        trainer = self._trainer
        batches = pack_groups(groups, indices, trainer.microbatch_tokens, trainer.share_prompts,
                              process_group.rank(), process_group.world_size())
        if not batches:
            return []
        plans = [plan_attention(batch, self._inverse_frequencies, self._device) for batch in batches]
        # Megatron divides the loss by the number of micro-batches; ours is normalised already.
        scale = 1 if forward_only else len(plans) * process_group.world_size()
        try:
            with cpu_backend.redirected(), torch.set_grad_enabled(not forward_only):
                return get_forward_backward_func()(
                    forward_step_func=partial(self._forward_step, loss=loss, scale=scale, gate=gate),
                    data_iterator=iter(plans),
                    model=self._model,
                    num_microbatches=len(plans),
                    seq_length=max(len(batch.tokens) for batch in batches),
                    micro_batch_size=1,
                    forward_only=forward_only,
                )
        except StopNoticed:
            return []

    def evaluate(self, groups: list[TrainGroup], indices: list[int], gate: StopGate) -> tuple[TokenValues, TokenValues]:
        """Log-probs and entropies of the groups at `indices`, on all ranks; the other groups' arrays stay empty.

        Raises StepAbandoned, on all ranks, where one was asked to stop.
        """
        wanted = set(indices)
        logprobs: TokenValues = [[np.zeros(len(response) if index in wanted else 0, np.float32) for response in group.responses]
                                 for index, group in enumerate(groups)]
        entropies: TokenValues = [list(rows) for rows in logprobs]

        def collect(batch: PackedBatch, output: Tensor) -> tuple[Tensor, Stats]:
            batch.scatter(output[0], logprobs)
            batch.scatter(output[1], entropies)
            return output[0, 0], {}

        self.run(groups, indices, collect, forward_only=True, gate=gate)
        gate.agree()
        return _gathered(logprobs), _gathered(entropies)

    def _forward_step(self, plans: Iterator[PackedLayoutParams], model: Any, loss: LossFunction, scale: int,
                      gate: StopGate) -> tuple[Tensor, Any]:
        gate.before_microbatch()
        plan = next(plans)
        batch = plan.batch
        assert batch is not None
        output = model(batch.tokens[None].to(self._device), batch.position_ids[None].to(self._device), None, packed_seq_params=plan)

        def scaled_loss(result: Tensor) -> tuple[Tensor, Stats]:
            value, stats = loss(batch, result)
            return value * scale, stats

        return output, scaled_loss


def _gathered(values: TokenValues) -> TokenValues:
    """The ranks' shares in one: what another rank has computed is zero here, so adding is exact."""
    if process_group.world_size() == 1:
        return values
    flat = [row for rows in values for row in rows]
    pieces = iter(np.split(process_group.sum_over_ranks(np.concatenate(flat)), np.cumsum([len(row) for row in flat])[:-1]))
    return [[next(pieces) for _ in rows] for rows in values]

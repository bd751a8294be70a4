"""Passing groups through the model: a copy's groups, packed into micro-batches, on Megatron's schedule.

    groups at indices --sequence_layout.py, packing.py--> micro-batches, as many as every other copy of the model has
        |
        v  batch/context_parallel.py, plan_attention: this rank's tokens, indices, masks, rotary angles     once per micro-batch, for all layers
    Megatron forward_backward_func (pipeline stages: 1F1B, interleaved with trainer.parallel.vpp)
        |   PackedGPTModel -> log-probs, entropies [2, n]           logits only where a response token is predicted
        |   ValueModel     -> values [1, n]
        v
    loss(batch, part, output) -> loss, statistics                   of this rank's share; gradients add up in its buffer

All ranks of a copy are given the same groups. Gradients are added up over copies beside the last backward pass, or afterwards (trained_model.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from workers.algorithms.loss_statistics import Stats
from workers.config.training import TrainerConfig
from workers.trainer.batch.context_parallel import RankPart, part_of
from workers.trainer.batch.group import TrainGroup
from workers.trainer.batch.packing import pack
from workers.trainer.batch.pipeline_schedule import BACKWARD, fewest_microbatches, span
from workers.trainer.batch.sequence_layout import PackedBatch, pack_chunks, split_groups
from workers.trainer.megatron.model.attention_plan import PackedLayoutParams, plan_attention
from workers.trainer.megatron.model.packed_attention import choose_flash_attention
from workers.trainer.megatron.model.router_replay import RouterReplay
from workers.trainer.megatron.objective import TokenValues
from workers.trainer.megatron.parallel import collectives, cpu_backend, process_group
from workers.trainer.megatron.parallel.stage_exchange import schedule_keywords
from workers.trainer.megatron.parallel.stop_gate import StopGate, StopNoticed

LossFunction = Callable[[PackedBatch, RankPart, Tensor], tuple[Tensor, Stats]]


class PackedPasses:
    """Passes through the `pieces` of a model that this rank has, in `dtype`; backward where they are in Megatron's data-parallel wrapper."""

    def __init__(self, pieces: list[Any], trainer: TrainerConfig, inverse_frequencies: Tensor, dtype: torch.dtype) -> None:
        self._pieces, self._trainer, self._inverse_frequencies = pieces, trainer, inverse_frequencies
        self._dispatchers = [module.token_dispatcher for piece in pieces for module in piece.modules() if isinstance(module, MoELayer)]
        routers = [module for piece in pieces for module in piece.modules() if isinstance(module, TopKRouter)]
        self._replays: list[RouterReplay] = [router.router_replay for router in routers if router.router_replay is not None]
        self._device, self._dtype = cpu_backend.device(), dtype
        self._passes = self._spans = 0.0
        # Stages wait for each other's micro-batches, and experts for all ranks' tokens: none can be left out.
        self._in_lockstep = trainer.parallel.pp > 1 or trainer.parallel.ep > 1
        self._by_lengths = self._device.type != "cpu" and _takes_flash(dtype, pieces[0].config.kv_channels)
        if self._by_lengths and self._device.type == "cuda":
            choose_flash_attention()

    def run(self, groups: list[TrainGroup], indices: list[int], loss: LossFunction, forward_only: bool, gate: StopGate) -> list[Stats]:
        """Pass the groups at `indices`, all ranks together; returns what `loss` gave besides the loss, by micro-batch (on the last stage).

        Gradients come out multiplied by the number of copies, by which Megatron divides when it adds them up (its schedule multiplies by
        the context-parallel size, by which it divides as well). Where the
        gate lets no more micro-batches through, the rest is left out: ask it afterwards.
        """
        batches = self._packed(groups, indices)
        if not batches:
            return []
        sums_begin = not forward_only and not self._in_lockstep and self._pieces[0].ddp_config.overlap_grad_reduce
        point_of_no_return = batches[-1] if sums_begin else None
        config, parallel = self._pieces[0].config, self._trainer.parallel
        lengths = [len(batch.tokens) // parallel.cp // (parallel.tp if config.sequence_parallel else 1) for batch in batches]
        if parallel.pp > 1 and not forward_only:
            self._passes += sum(lengths) * (1 + BACKWARD)
            self._spans += span(lengths, parallel.pp, parallel.vpp)
        # Megatron divides the loss by the number of micro-batches; ours is normalised already.
        scale = 1 if forward_only else len(batches) * process_group.num_copies()
        plans = itertools.tee((self._plan(batch) for batch in batches), parallel.vpp)
        for part in (*self._dispatchers, *self._replays):
            part.begin(gradients=not forward_only)
        try:
            with cpu_backend.redirected(), torch.set_grad_enabled(not forward_only):
                return get_forward_backward_func()(
                    forward_step_func=partial(self._forward_step, loss=loss, scale=scale, gate=gate, last=point_of_no_return),
                    data_iterator=list(plans) if parallel.vpp > 1 else plans[0],
                    model=self._pieces if parallel.vpp > 1 else self._pieces[0],
                    num_microbatches=len(batches),
                    seq_length=max(len(batch.tokens) for batch in batches),
                    micro_batch_size=1,
                    forward_only=forward_only,
                    **schedule_keywords(config, lengths),
                )
        except StopNoticed:
            if point_of_no_return is not None:
                gate.agree(last=True)  # as the others do before their last micro-batch
            return []
        finally:
            for part in (*self._dispatchers, *self._replays):
                part.begin(gradients=False)

    def bubble(self) -> dict[str, float]:
        """`pipeline_bubble`: the share of training passes since the last call in which a stage has nothing to do, by the tokens of the micro-batches,
        as if all stages were equal and nothing were sent; nothing without stages."""
        passes, spans, self._passes, self._spans = self._passes, self._spans, 0.0, 0.0
        return {"pipeline_bubble": 1 - passes / spans} if spans else {}

    def _packed(self, groups: list[TrainGroup], indices: list[int]) -> list[PackedBatch]:
        """Micro-batches, the same number on all copies, of as many tokens as can be divided among the ranks of a copy."""
        trainer, parallel = self._trainer, self._trainer.parallel
        chunks = split_groups(groups, indices, trainer.microbatch_tokens, trainer.share_prompts)
        fewest = len(pack([chunk.cost for chunk in chunks], trainer.microbatch_tokens))
        own = max(fewest, min(len(chunks), fewest_microbatches(parallel.pp)))
        number = int(collectives.max_over_ranks(np.array([own]))[0])
        if parallel.vpp > 1:
            number += -number % parallel.pp  # interleaved stages take as many micro-batches in turn
        multiple = (parallel.tp if parallel.sequence else 1) * (2 * parallel.cp if parallel.cp > 1 else 1)
        return pack_chunks(groups, chunks, trainer.microbatch_tokens, number, multiple, even=parallel.pp > 1)

    def _plan(self, batch: PackedBatch) -> PackedLayoutParams:
        size = self._trainer.parallel.cp
        parts = [part_of(batch, rank, size) for rank in range(size)]
        own = parts[parallel_state.get_context_parallel_rank()]
        plan = plan_attention(batch, own, self._inverse_frequencies, self._device, self._dtype, parts if size > 1 else None, self._by_lengths)
        if self._replays and batch.routing is not None:
            # A mixture's tensor-parallel ranks share the tokens between the matrices (parallel_limits.py).
            rows = np.split(own.rows, self._trainer.parallel.tp)[parallel_state.get_tensor_model_parallel_rank()]
            plan.routing = cpu_backend.upload(batch.routing[torch.from_numpy(rows)], self._device)
        return plan

    def evaluate(self, groups: list[TrainGroup], indices: list[int], gate: StopGate, num_values: int = 2) -> list[TokenValues]:
        """The `num_values` rows of the model's output for the groups at `indices`, on all ranks of the copy; the other groups' arrays stay empty.

        Raises StepAbandoned, on all ranks, where one was asked to stop.
        """
        wanted = set(indices)
        values: list[TokenValues] = [
            [[np.zeros(len(response) if index in wanted else 0, np.float32) for response in group.responses] for index, group in enumerate(groups)]
            for _ in range(num_values)]
        outputs: list[tuple[PackedBatch, RankPart, Tensor]] = []

        def collect(batch: PackedBatch, part: RankPart, output: Tensor) -> tuple[Tensor, Stats]:
            outputs.append((batch, part, output))
            return output.sum(), {}

        self.run(groups, indices, collect, forward_only=True, gate=gate)
        gate.agree()
        for batch, part, output in outputs if process_group.values_count() else []:
            full = torch.zeros(num_values, len(batch.targets))
            full[:, part.selected] = output.cpu()
            for row, into in zip(full, values, strict=True):
                batch.scatter(row, into)
        return [_gathered(rows) for rows in values]

    def _forward_step(self, plans: Iterator[PackedLayoutParams], model: Any, loss: LossFunction, scale: int,
                      gate: StopGate, last: PackedBatch | None) -> tuple[Tensor, Any]:
        if not self._in_lockstep:
            gate.before_microbatch()
        plan = next(plans)
        batch, part = plan.batch, plan.part
        if batch is last:
            gate.agree(last=True)  # its backward pass begins to add up the gradients of all copies
        assert batch is not None and part is not None
        tokens, positions = (cpu_backend.upload(ids[None], self._device) for ids in (part.tokens, part.position_ids))
        for replay in self._replays:
            replay.choose(plan.routing)
        output = model(tokens, positions, None, packed_seq_params=plan)

        def scaled_loss(result: Tensor) -> tuple[Tensor, Stats]:
            value, stats = loss(batch, part, result)
            return value * scale, stats

        return output, scaled_loss


def _takes_flash(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether torch's flash attention takes such heads: half precision, sizes it is made for, Ampere or newer."""
    return dtype is torch.bfloat16 and head_dim % 8 == 0 and head_dim <= 256 and torch.cuda.get_device_capability() >= (8, 0)


def _gathered(values: TokenValues) -> TokenValues:
    """What the ranks of a copy have computed in one: what another rank has computed is zero here, so adding is exact."""
    flat = [row for rows in values for row in rows]
    if not flat:
        return values
    pieces = iter(np.split(collectives.sum_in_copy(np.concatenate(flat)), np.cumsum([len(row) for row in flat])[:-1]))
    return [[next(pieces) for _ in rows] for rows in values]

"""A model in training, as one rank has it: policy and critic are one each."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from workers.algorithms.loss_statistics import Stats
from workers.config import RunConfig, TrainerConfig
from workers.trainer.megatron.hf_conversion import pieces_of
from workers.trainer.megatron.model.model import PackedGPTModel
from workers.trainer.megatron.objective import merge_over_ranks
from workers.trainer.megatron.optimizer.optimizer import build_optimizer, build_scheduler, clip_gradients, new_run
from workers.trainer.megatron.parallel import cpu_backend, process_group
from workers.trainer.megatron.passes import PackedPasses


class TrainedModel:
    """This rank's part of `model` with float32 gradients, its share of the optimizer's state, and the schedule.

    For each minibatch of training step s: `zero_gradients`, `passes.run`, `clip`, `update(s)`; on all ranks together.
    """

    def __init__(self, model: Any, trainer: TrainerConfig, run: RunConfig, inverse_frequencies: Tensor, dtype: torch.dtype,
                 lr_key: str = "trainer.lr") -> None:
        """`model`: of `build_model`. Call within `cpu_backend.redirected()`; `lr_key` is where `trainer.lr` comes from. Raises ConfigError where the
        warm-up of the learning rate does not end within the run."""
        self.model, self._lr_key, self._clip_norm = model, lr_key, trainer.clip_grad
        # Whether gradients are added up over copies while the last micro-batch's backward pass still makes some.
        overlap = parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap)
        self.parallel = [DistributedDataParallel(piece.config, ddp, in_dtype(piece, dtype)) for piece in pieces_of(model)]
        if overlap:
            each = [part.no_sync for part in self.parallel]
            self.parallel[0].config.no_sync_func = each if len(each) > 1 else each[0]
        for part in self.parallel:
            if process_group.world_size() == 1:
                _leave_out_exchanges(part)
        self.optimizer: Any = build_optimizer(self.parallel, trainer, dtype)
        self.scheduler = build_scheduler(self.optimizer, trainer, run)
        self.passes = PackedPasses(self.parallel, trainer, inverse_frequencies, dtype)

    @property
    def lr(self) -> float:
        """The learning rate of the last update."""
        return float(self.optimizer.param_groups[0]["lr"])

    def zero_gradients(self) -> None:
        """Before the passes of a minibatch."""
        for part in self.parallel:
            _end_what_was_abandoned(part)
            part.zero_grad_buffer()
        self.optimizer.zero_grad()

    def totals(self, stats: list[Stats], none: Stats, step: int, number: int) -> dict[str, float]:
        """Statistics over all ranks of minibatch `number`, of which this rank has `stats`, see `merge_over_ranks`.

        Raises FloatingPointError where the loss is not finite.
        """
        totals = merge_over_ranks(stats, none)
        if not math.isfinite(totals["loss"]):
            raise FloatingPointError(f"training step {step}, minibatch {number}: the loss is {totals['loss']}. The weights are those "
                                     f"before this minibatch. {new_run(self._lr_key)}")
        return totals

    def clip(self, stats: list[Stats], none: Stats, step: int, number: int) -> dict[str, float]:
        """Add up the gradients of all ranks and clip them; returns `totals`, and `grad_norm` before that.

        Raises FloatingPointError where loss or norm is not finite, and then nothing has changed.
        """
        with cpu_backend.redirected():
            for part in self.parallel:
                if part.ddp_config.overlap_grad_reduce:
                    _start_what_waits(part)
            finalize_model_grads(self.parallel)
            totals = self.totals(stats, none, step, number)
            return totals | {"grad_norm": clip_gradients(self.optimizer, self._clip_norm, step, self._lr_key)}

    def advance(self, step: int) -> None:
        """Go on to training step `step` in the schedule: its learning rate is that of the updates from now on."""
        self.scheduler.step(step - self.scheduler.num_steps)

    def update(self, step: int) -> None:
        """An optimizer step with the clipped gradients, one of training step `step`."""
        self.advance(step)
        with cpu_backend.redirected():
            self.optimizer.step_with_ready_grads()


def in_dtype(model: PackedGPTModel, dtype: torch.dtype) -> torch.nn.Module:
    """`model`, or a piece of one, as Megatron's schedules run it in `dtype`."""
    return Float16Module(model.config, model) if dtype is torch.bfloat16 else model


def _groups(parallel: DistributedDataParallel) -> list[Any]:
    return [*parallel.bucket_groups, *parallel.expert_parallel_bucket_groups]


def _end_what_was_abandoned(parallel: DistributedDataParallel) -> None:
    """A step that ranks in lockstep give up after its passes has sums over copies under way, on all of them."""
    for group in _groups(parallel):
        if group.grad_reduce_handle is not None:
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def _start_what_waits(parallel: DistributedDataParallel) -> None:
    """A minibatch without gradients has no backward pass that starts the sums over copies."""
    for group in _groups(parallel):
        if group.grad_reduce_handle is None and not group.is_first_batch:
            group.start_grad_sync()


def _leave_out_exchanges(parallel: DistributedDataParallel) -> None:
    """A single rank's shares of gradients and parameters are the whole buffers, where they stand: sent to itself, they would only be copied."""
    def nothing(*arguments: Any, **keywords: Any) -> None:
        pass

    for group in _groups(parallel):
        group.start_grad_sync = group.start_param_sync = nothing

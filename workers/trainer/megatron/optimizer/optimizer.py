"""Megatron-core's optimizer and learning-rate schedule, and clipping that refuses gradients that are not finite."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import OptimizerConfig, clip_grads, distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

from workers.config import ConfigError, RunConfig, TrainerConfig
from workers.trainer.megatron.optimizer.adam import GroupStepAdamW


def build_optimizer(pieces: list[Any], trainer: TrainerConfig, dtype: torch.dtype) -> Any:
    """Megatron's distributed optimizer over the `pieces` of a model (in their data-parallel wrappers): AdamW, no decay of biases and norms.

    With bfloat16 parameters it holds float32 master weights; gradients are float32 in both cases. Its state is spread over the ranks
    that hold the same parameters; of `trainer.optimizer_offload` it keeps that share in the host's memory, where there is CUDA.
    """
    _use_own_adam()
    offload = trainer.optimizer_offload if torch.cuda.is_available() else 0.0
    config = OptimizerConfig(
        optimizer="adam",
        lr=trainer.lr,
        min_lr=trainer.min_lr,
        weight_decay=trainer.weight_decay,
        adam_beta1=trainer.adam_beta1,
        adam_beta2=trainer.adam_beta2,
        adam_eps=trainer.adam_eps,
        clip_grad=trainer.clip_grad,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=offload > 0,
        optimizer_offload_fraction=offload,
        use_precision_aware_optimizer=offload > 0,
        overlap_cpu_optimizer_d2h_h2d=offload > 0,
    )
    with torch.no_grad() if offload else contextlib.nullcontext():  # of float32 parameters, the hybrid optimizer takes views as its own
        return get_megatron_optimizer(config, pieces)


def _use_own_adam() -> None:
    """Where neither Transformer Engine nor apex is installed, have Megatron-core build `GroupStepAdamW` instead of torch's AdamW, and take
    `_norm`: its own waits for the device once for every parameter."""
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
    if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        megatron_optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def _norm(chunk_size: int, overflow: Tensor, lists: list[list[Tensor]], per_tensor: bool) -> tuple[Tensor, None]:
    """The Euclidean norm of all tensors together, float32 [1], in the form of apex's multi_tensor_l2norm."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).reshape(1), None


def build_scheduler(optimizer: Any, trainer: TrainerConfig, run: RunConfig) -> OptimizerParamScheduler:
    """Linear warm-up over `warmup_steps`, then constant, or linear or cosine decay down to `min_lr` one step after the last.

    It is advanced before each training step's first update, so that step s (from 1) of the warm-up has
    lr * s / warmup_steps, and no step is lost to a learning rate of zero. Raises ConfigError where the warm-up does not end within the run.
    """
    if trainer.warmup_steps > run.num_steps:
        raise ConfigError(f"trainer.warmup_steps={trainer.warmup_steps}: must not be more than run.num_steps={run.num_steps}. "
                          "Warm up for less, or train for longer")
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=trainer.lr,
        min_lr=trainer.min_lr,
        lr_warmup_steps=trainer.warmup_steps,
        lr_decay_steps=run.num_steps + 1,
        lr_decay_style=trainer.lr_schedule.value,
        start_wd=trainer.weight_decay,
        end_wd=trainer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def new_run(lr_key: str) -> str:
    """What helps where training has diverged; `lr_key`: of the learning rate's config."""
    return f"Start a new run from an earlier export (model.path), with a lower {lr_key}, or in float32 (trainer.dtype)"


def clip_gradients(optimizer: Any, max_norm: float, step: int, lr_key: str = "trainer.lr") -> float:
    """Clip by the global norm, ready for `optimizer.step_with_ready_grads()`; returns the norm before clipping. `lr_key`: of its config.

    Together they are Megatron's ChainedOptimizer.step, with a check between norm and update: a gradient that is not finite raises
    FloatingPointError and leaves weights and optimizer state as they were.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise FloatingPointError(f"training step {step}: the gradient norm is {norm}. The weights are those before this update. "
                                 f"{new_run(lr_key)}")
    if norm > max_norm:
        torch._foreach_mul_(_gradients(optimizer), max_norm / (norm + 1e-6))
    return norm


def _gradients(optimizer: Any) -> list[Tensor]:
    """The gradients that the update will use: of a chain of optimizers (experts have one of their own), and where each looks for them."""
    found = []
    for part in optimizer.chained_optimizers:
        attribute = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
        found += [getattr(parameter, attribute, None) for parameter in part.get_parameters()]
    return [gradient for gradient in found if gradient is not None]

"""The experts of a rank as one product each way (torch's grouped_mm), instead of a chain of operators for each expert.

    rows [n, hidden], sorted by expert --grouped_mm--> SwiGLU, weighted --grouped_mm--> [n, hidden]

Parameters stay what Megatron-core's SequentialMLP has, a matrix for each expert: checkpoints, exports and the optimizer know nothing of this.
They are laid next to each other for a product and then forgotten: copying an expert takes a small part of the time that its tokens take.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.fusions.fused_bias_swiglu import WeightedSwiGLUFunction
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

ALIGNMENT = 16
"""Bytes of which grouped_mm wants every row of a matrix to be a multiple."""

_one_by_one = SequentialMLP.forward


def install() -> None:
    """Have every SequentialMLP compute so, but those whose matrices have rows that grouped_mm does not take."""
    SequentialMLP.forward = _forward  # type: ignore[method-assign]


def _forward(experts: Any, rows: Tensor, rows_per_expert: Tensor, weights: Tensor) -> tuple[Tensor, None]:
    """`rows` [n, hidden], of the first expert first; `rows_per_expert` int64 [experts]; `weights` [n], the router's. Returns [n, hidden]."""
    up, down = ([getattr(expert, name).weight for expert in experts.local_experts] for name in ("linear_fc1", "linear_fc2"))
    if any(matrix[0].shape[1] * matrix[0].element_size() % ALIGNMENT for matrix in (up, down)):
        return _one_by_one(experts, rows, rows_per_expert, weights)
    ends = rows_per_expert.cumsum(0, dtype=torch.int32)
    inner = _GroupedLinear.apply(rows, ends, *up)
    if experts.config.bias_activation_fusion:
        inner = WeightedSwiGLUFunction.apply(inner, weights[:, None], False)
    else:
        gate, linear = inner.chunk(2, dim=-1)
        inner = (functional.silu(gate) * linear * weights[:, None]).to(inner.dtype)
    return _GroupedLinear.apply(inner, ends, *down), None


@functools.cache
def _placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A gradient that takes the place of one in the hands of Megatron-core's wrapper, and is a single number."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


class _GroupedLinear(torch.autograd.Function):
    """x [n, in], of whose rows `ends` int32 [experts] says where each expert's end, times each expert's weight [out, in]: [n, out]. The
    weights' gradients go straight to where Megatron-core's data-parallel wrapper adds them up: it takes two operators for each expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, ends)
        ctx.weights = weights
        return functional.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x, ends), weights, grad = ctx.saved_tensors, ctx.weights, grad.contiguous()
        of_x = functional.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[2]:
            sums = [weight.main_grad for weight in weights]
            torch._foreach_add_(sums, functional.grouped_mm(grad.t(), x, offs=ends).to(sums[0].dtype).unbind())
            for weight in weights:  # so the wrapper's hook knows that there was one
                weight.grad, weight.grad_added_to_main_grad = _placeholder(weight.shape, weight.dtype, weight.device), True
        return of_x, None, *[None] * len(weights)

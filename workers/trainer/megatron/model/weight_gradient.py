"""Gradients of matrices, added up in float32 by the product that makes them: none is written in the model's dtype, read again and added.

Megatron-core's linear layers do it with apex (TransformerConfig.gradient_accumulation_fusion); what is here takes its place, with torch's own
products, and is the LM head's, too.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left` [m, k] times `right` [k, n], both of one floating dtype, to `total` float32 [m, n]."""
    if left.dtype is torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:  # only there are products of bfloat16 summed into float32
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)


class Accumulation:
    """In the form of apex's module `fused_weight_gradient_mlp_cuda`."""

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, grad: Tensor, total: Tensor) -> None:
        """`x` [k, in], `grad` [k, out]; `total` float32 [out, in]."""
        add_product(total, grad.t(), x)


def install() -> None:
    """Have Megatron-core's layers take it."""
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = Accumulation, True

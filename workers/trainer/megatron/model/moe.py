"""Mixtures of experts in Megatron-core: what its TransformerConfig and layer spec need, besides what every model needs.

Every token goes to its experts, none is dropped; there is no balancing loss, as it would be an objective of its own in the policy's update.
The router works in float32. Each expert is an MLP of its own (Megatron's SequentialMLP): its grouped kernels need Transformer Engine.

Without CUDA, tokens are dealt out by `CpuTokenDispatcher`: Megatron's own copies the numbers of tokens to the host on a CUDA stream.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer, moe_utils
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from workers.config import ParallelConfig
from workers.model.architecture import Architecture
from workers.model.parallel_limits import expert_tensor_parallel


class CpuTokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron-core's all-to-all dispatcher where the numbers of tokens are on the host already."""

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        if point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits"):
                splits = getattr(self, name)
                setattr(self, name, splits.tolist() if isinstance(splits, Tensor) else splits)  # all_to_all_single takes lists only
        return tokens_per_expert


def forget_tokens(layer: torch.nn.Module, arguments: Any = (), output: Any = None) -> None:
    """Forward hook of Megatron-core's MoELayer, called once more after a minibatch's passes. Its dispatcher keeps the last tokens' probabilities,
    and their graph the layer's input and its gradient: two tensors of hidden states a layer until the next pass, where activations are made
    again."""
    dispatcher = layer.token_dispatcher
    for name, value in vars(dispatcher).items():
        if isinstance(value, Tensor) and value.requires_grad:
            setattr(dispatcher, name, None)


def config_keywords(architecture: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """Keywords of TransformerConfig for the experts of `architecture`, besides their dispatcher and `ep`; none for a dense model."""
    mixture = architecture.mixture
    if mixture is None:
        return {}
    _prepare_megatron()
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.intermediate_size,
        "moe_router_topk": mixture.experts_per_token,
        # The softmax of the chosen experts' logits is the softmax of all, scaled to a sum of 1.
        "moe_router_pre_softmax": not mixture.normalized,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "expert_tensor_parallel_size": expert_tensor_parallel(parallel),
    }


def spec_keywords(architecture: Architecture) -> dict[str, Any]:
    """Keywords of get_gpt_layer_local_spec for the experts of `architecture`; none for a dense model."""
    return {} if architecture.mixture is None else {"num_experts": architecture.mixture.num_experts, "moe_grouped_gemm": False}


def _prepare_megatron() -> None:
    """Megatron-core 0.16.1 looks at `te_general_gemm` in every routing, but defines it only where Transformer Engine is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not torch.cuda.is_available():
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # else it makes one
        moe_layer.MoEAlltoAllTokenDispatcher = CpuTokenDispatcher

"""Mixtures of experts in Megatron-core: what its TransformerConfig and layer spec need, besides what every model needs.

Every token goes to its experts, none is dropped; there is no balancing loss, as it would be an objective of its own in the policy's update.
The router works in float32. Each expert has parameters of its own (Megatron's SequentialMLP), and all of a rank's compute together
(grouped_experts.py); tokens are dealt out by token_dispatcher.py. Megatron's own for this need Transformer Engine, or wait for the device.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import moe_layer, moe_utils

from workers.config import ParallelConfig
from workers.model.architecture import Architecture
from workers.model.parallel_limits import expert_tensor_parallel
from workers.trainer.megatron.model import grouped_experts
from workers.trainer.megatron.model.token_dispatcher import TokenDispatcher


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
    """Put our parts in the places of Megatron-core's. 0.16.1 looks at `te_general_gemm` in every routing, but defines it only where Transformer
    Engine is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    moe_layer.MoEAlltoAllTokenDispatcher = TokenDispatcher
    grouped_experts.install()

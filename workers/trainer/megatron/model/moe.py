"""Mixtures of experts in Megatron-core: what its TransformerConfig and layer spec need, besides what every model needs.

Every token goes to its experts, none is dropped; there is no balancing loss, as it would be an objective of its own in the policy's update.
The router works in float32. Each expert has parameters of its own (Megatron's SequentialMLP), and all of a rank's compute together
(grouped_experts.py); tokens are dealt out by token_dispatcher.py. Megatron's own for this need Transformer Engine, or wait for the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer.moe import moe_layer, moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from workers.config import ParallelConfig
from workers.model.architecture import Architecture
from workers.model.experts import MixtureOfExperts
from workers.model.frozen import read_frozen
from workers.model.parallel_limits import expert_tensor_parallel
from workers.trainer.megatron.hf_conversion import pieces_of
from workers.trainer.megatron.model import grouped_experts
from workers.trainer.megatron.model.token_dispatcher import TokenDispatcher
from workers.trainer.megatron.parallel import cpu_backend


def config_keywords(architecture: Architecture, parallel: ParallelConfig) -> dict[str, Any]:
    """Keywords of TransformerConfig for the experts of `architecture`, besides their dispatcher and `ep`; none for a dense model."""
    mixture = architecture.mixture
    if mixture is None:
        return {}
    _prepare_megatron()
    return _router_keywords(mixture) | {
        "moe_layer_freq": [int(architecture.has_experts(layer)) for layer in range(architecture.num_layers)],
        "moe_shared_expert_intermediate_size": mixture.shared_size or None,
        "num_moe_experts": mixture.num_experts,
        "moe_ffn_hidden_size": mixture.intermediate_size,
        "moe_router_topk": mixture.experts_per_token,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": False,
        "expert_tensor_parallel_size": expert_tensor_parallel(parallel),
    }


def _router_keywords(mixture: MixtureOfExperts) -> dict[str, Any]:
    if not mixture.sigmoid:
        # The softmax of the chosen experts' logits is the softmax of all, scaled to a sum of 1.
        return {"moe_router_pre_softmax": not mixture.normalized}
    groups = {"moe_router_num_groups": mixture.num_groups, "moe_router_group_topk": mixture.groups_per_token} if mixture.limited else {}
    return {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": mixture.scale, **groups}


class Router(TopKRouter):
    """Megatron-core's router, which says of each token its experts only: its own puts them, and their weights, among the zeros of all others."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The weights, float32, and numbers, int64, of each token's experts, [t, k]; `logits` float32 [.., experts]."""
        logits, early = logits.view(-1, self.num_experts), self.config.moe_router_pre_softmax
        scores, experts = self._chosen(logits.softmax(-1) if early else logits)
        return scores if early else scores.softmax(-1), experts

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The highest of `scores` [t, experts], or those that are replayed, and whose they are, [t, k]."""
        arguments = (scores, self.topk, self.config.moe_router_num_groups, self.config.moe_router_group_topk)
        return _highest(*arguments) if self.router_replay is None else self.router_replay.get_replay_topk(*arguments, _highest)


def _highest(scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None) -> tuple[Tensor, Tensor]:
    if not group_topk:
        return scores.topk(topk, dim=1)
    return moe_utils.group_limited_topk(scores, topk, *scores.shape, num_groups, group_topk)


class BiasedRouter(Router):
    """A router with sigmoids, whose choice among experts has a bias that nothing updates (Megatron-core's `moe_router_enable_expert_bias` does):
    float32 [num_experts], whatever the model is in, and no part of checkpoints, as it is always the starting model's (workers/model/frozen.py)."""

    expert_bias: Tensor

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=cpu_backend.device()), persistent=False)

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As Router.routing."""
        scores = logits.view(-1, self.num_experts).sigmoid()
        _, experts = self._chosen(scores + self.expert_bias)
        weights = scores.gather(1, experts)
        if self.topk > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * (self.config.moe_router_topk_scaling_factor or 1.0), experts

    def _apply(self, change: Any, recurse: bool = True) -> BiasedRouter:
        bias = self.expert_bias
        super()._apply(change, recurse)
        self.expert_bias = bias.to(self.expert_bias.device)
        return self


def load_biases(model: Any, folder: Path, architecture: Architecture) -> None:
    """Give this rank's routers the biases in `folder`. Raises `ModelError`."""
    biases = read_frozen(folder, architecture)
    for layer in [layer for piece in pieces_of(model) for layer in piece.decoder.layers] if biases else ():
        if isinstance(router := getattr(layer.mlp, "router", None), BiasedRouter):
            router.expert_bias.copy_(biases[f"model.layers.{layer.layer_number - 1}.mlp.gate.e_score_correction_bias"])


def spec_keywords(architecture: Architecture, layer: int) -> dict[str, Any]:
    """Keywords of get_gpt_layer_local_spec for the experts of a layer of `architecture`; none for a dense one."""
    mixture = architecture.mixture if architecture.has_experts(layer) else None
    return {} if mixture is None else {"num_experts": mixture.num_experts, "moe_grouped_gemm": False}


def _prepare_megatron() -> None:
    """Put our parts in the places of Megatron-core's. 0.16.1 looks at `te_general_gemm` in every routing, but defines it only where Transformer
    Engine is installed."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    moe_layer.MoEAlltoAllTokenDispatcher = TokenDispatcher
    grouped_experts.install()

"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, Section 2.1) with Megatron-core's parameters, for packed trunks and branches.

    hidden --q_down--> latent --norm, q_up--> queries  [nope | rope]                  split over tensor-parallel ranks by heads
    hidden --kv_down-> latent --norm, kv_up-> keys [nope], values; behind the latent: the rope part of all heads' keys
        --> rotated at the layout's positions --> PackedAttention

Megatron-core's own forward pass cannot be taken: it rotates by the place in the packed batch, and, without sequence parallelism, loses the gradient
that other ranks' heads have for the shared part of the keys.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import ModuleSpec, multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from workers.model.architecture import Architecture
from workers.model.latent_attention import NORM_EPS
from workers.trainer.megatron.model.attention_plan import PackedLayoutParams
from workers.trainer.megatron.model.packed_attention import rotate


class LatentSelfAttention(MLASelfAttention):
    """Megatron-core's module with a forward pass for packed micro-batches. `interleaved`: rotary pairs are neighbours."""

    def __init__(self, *arguments: Any, interleaved: bool, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._interleaved = interleaved
        for name in ("q_layernorm", "kv_layernorm"):
            if hasattr(self, name):
                getattr(self, name).eps = NORM_EPS

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """From Megatron-core 0.19 on, which else takes Transformer Engine's where it finds nothing better: the modules of the spec."""
        return {name: getattr(submodules, name) for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")}

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedLayoutParams,
                **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`hidden_states` [t, 1, hidden], with sequence parallelism this rank's share of the t; returns the same, and no bias."""
        config = self.config
        if config.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            latent = gather_from_tensor_model_parallel_region(self.linear_q_down_proj(hidden_states)[0])
            query = self.linear_q_up_proj(self.q_layernorm(self._shared(latent)))[0]
        latent = gather_from_tensor_model_parallel_region(self.linear_kv_down_proj(hidden_states)[0])
        latent, key_rope = latent.split([config.kv_lora_rank, config.qk_pos_emb_head_dim], dim=-1)
        key_value = self.linear_kv_up_proj(self.kv_layernorm(self._shared(latent)))[0]
        query, key_value = (each.view(len(each), self.num_attention_heads_per_partition, -1) for each in (query, key_value))
        # Each rank's heads have a gradient of their own for it: they are added up.
        key_rope = self._rotated(copy_to_tensor_model_parallel_region(key_rope), packed_seq_params)
        query_nope, query_rope = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], dim=-1)
        key, value = key_value.split([config.qk_head_dim, config.v_head_dim], dim=-1)
        query = torch.cat([query_nope, self._rotated(query_rope, packed_seq_params)], dim=-1)
        key = torch.cat([key, key_rope.expand(-1, key.shape[1], -1)], dim=-1)
        attend = self._checkpointed_attention_forward if self.checkpoint_core_attention and self.training else self.core_attention
        output = attend(query, key, value, attention_mask, packed_seq_params=packed_seq_params)
        return self.linear_proj(output.reshape(len(output), 1, -1))

    def _rotated(self, values: Tensor, plan: PackedLayoutParams) -> Tensor:
        assert plan.cos is not None and plan.sin is not None
        if self._interleaved:
            values = values.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(values, plan.cos, plan.sin)

    def _shared(self, latent: Tensor) -> Tensor:
        """This rank's share of the tokens, where ranks share them: the matrix behind gathers them."""
        return scatter_to_sequence_parallel_region(latent) if self.config.sequence_parallel else latent


def config_keywords(architecture: Architecture) -> dict[str, Any]:
    """Keywords of MLATransformerConfig; none for other attention."""
    latent, scaling = architecture.latent, architecture.rope_scaling or {}
    if latent is None:
        return {}
    return {
        "q_lora_rank": latent.query_rank or None, "kv_lora_rank": latent.kv_rank, "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim, "v_head_dim": latent.value_dim,
        "rope_type": "rope",  # Megatron-core's own angles are made and not used
        "rotary_scaling_factor": scaling.get("factor", 1.0), "mscale_all_dim": scaling.get("mscale", 0.0)}  # for the scale of its products


def put_in(attention: ModuleSpec, architecture: Architecture, norm: type, matrix: type) -> None:
    """Make `attention`, of a layer spec for latent attention, ours; `norm` and `matrix` (split by its outputs) as the other layers have them."""
    assert architecture.latent is not None
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False  # Megatron-core 0.16.1 takes it to be there
    attention.module, attention.params = LatentSelfAttention, {**attention.params, "interleaved": architecture.latent.interleaved}
    for name in ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"):
        setattr(attention.submodules, name, matrix)
    attention.submodules.kv_layernorm = norm
    attention.submodules.q_layernorm = norm if architecture.latent.query_rank else IdentityOp

"""Self-attention of packed trunks and branches with Megatron-core's parameters: its own modules in fewer operators.

    hidden --one matrix--> queries, keys, values --norms, rotary embedding of queries and keys--> PackedAttention --one matrix--> hidden

Rotary embedding is applied at the positions of the layout: they go on from the trunk in every branch, which Megatron-core's own cannot say.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from workers.trainer.megatron.model.attention_plan import PackedLayoutParams
from workers.trainer.megatron.model.packed_attention import rotate


class PackedSelfAttention(SelfAttention):
    """Megatron-core's module with a forward pass for packed micro-batches."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedLayoutParams,
                **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """`hidden_states` [t, 1, hidden], with sequence parallelism this rank's share of the t; returns the same, and no bias."""
        plan, size = packed_seq_params, self.hidden_size_per_attention_head
        assert plan.cos is not None and plan.sin is not None
        mixed = self.linear_qkv(hidden_states)[0]
        mixed = mixed.view(len(mixed), self.num_query_groups_per_partition, -1)
        query, key, value = mixed.split([mixed.shape[-1] - 2 * size, size, size], dim=-1)
        query = query.reshape(len(query), -1, size)
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = rotate(query, plan.cos, plan.sin), rotate(key, plan.cos, plan.sin)
        attend = self._checkpointed_attention_forward if self.checkpoint_core_attention and self.training else self.core_attention
        output = attend(query, key, value, attention_mask, packed_seq_params=plan)
        return self.linear_proj(output.view(len(output), 1, -1))

"""A Megatron-core GPT model that turns a packed micro-batch into log-probs of its response tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from workers.config import Dtype
from workers.trainer.megatron import cpu_backend
from workers.trainer.megatron.hf_conversion import load_hf
from workers.trainer.megatron.lm_head import token_logprobs
from workers.trainer.megatron.packed_attention import PackedAttention, PackedLayoutParams
from workers.weights.architecture import Architecture

DTYPES = {Dtype.float32: torch.float32, Dtype.bfloat16: torch.bfloat16}


class PackedGPTModel(GPTModel):
    """GPTModel whose output is float32 [2, N]: log-probs (with gradient) and entropies (without) of N response tokens.

    Logits are made for the positions that predict a response token only, see lm_head.py.
    """

    temperature: float = 1.0

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        """`input_ids`, `position_ids` int64 [1, T]; `packed_seq_params` is a PackedLayoutParams."""
        embedded = None
        if self.pre_process:
            # A sparse gradient: the dense one would be a fresh [vocabulary, hidden] tensor for a few hundred rows.
            embedded = functional.embedding(input_ids, self.embedding.word_embeddings.weight, sparse=True).transpose(0, 1)
        return super().forward(input_ids, position_ids, attention_mask, decoder_input=embedded, **kwargs)

    def _postprocess(self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedLayoutParams, **kwargs: Any) -> Tensor:
        if not self.post_process:
            return hidden_states
        batch = packed_seq_params.batch
        assert batch is not None
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        device = hidden_states.device
        hidden = hidden_states[:, 0].index_select(0, batch.predict_at.to(device))
        pair = token_logprobs(hidden, weight, batch.predict_index.to(device), batch.targets.to(device), self.temperature)
        return torch.stack(pair)


def transformer_config(architecture: Architecture, dtype: torch.dtype) -> TransformerConfig:
    """Megatron-core's configuration of `architecture`: no dropout, no fused kernels (they need CUDA)."""
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.intermediate_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Every parameter is overwritten by load_hf, so there is nothing to initialise.
        use_cpu_initialization=cpu_backend.device().type == "cpu",
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )


def build_model(architecture: Architecture, folder: Path, dtype: torch.dtype, temperature: float) -> PackedGPTModel:
    """The model with the weights in `folder`, in `dtype`. Call within `cpu_backend.redirected()`, groups initialised."""
    config = transformer_config(architecture, dtype)
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    model = PackedGPTModel(
        config,
        spec,
        vocab_size=architecture.vocab_size,
        max_sequence_length=architecture.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="none",  # PackedAttention rotates, at the positions of the layout
        share_embeddings_and_output_weights=architecture.tied,
    )
    model.temperature = temperature
    load_hf(model, folder, architecture)
    return model.to(cpu_backend.device())

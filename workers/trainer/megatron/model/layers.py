"""The transformer layers of a model in Megatron-core's terms: its configuration, and the modules that layers are made of."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from workers.config import Recompute, TrainerConfig
from workers.model.architecture import Architecture
from workers.trainer.megatron.model import mla, moe, weight_gradient
from workers.trainer.megatron.model.packed_attention import PackedAttention
from workers.trainer.megatron.model.self_attention import PackedSelfAttention
from workers.trainer.megatron.parallel import cpu_backend


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, in the form of Megatron-core's layer specs; its gradient is summed over the ranks that share the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., hidden_size], normalised. What is kept for the backward pass is `x` alone: of keys, not all that they are a view of."""
        return super().forward(x.contiguous())


def transformer_config(architecture: Architecture, dtype: torch.dtype, trainer: TrainerConfig) -> TransformerConfig:
    """Megatron-core's configuration of `architecture`, spread as `trainer.parallel` says: no dropout; SwiGLU and, with Transformer Engine, its layers
    are fused."""
    parallel, on_cpu = trainer.parallel, cpu_backend.device().type == "cpu"
    weight_gradient.install()
    return (MLATransformerConfig if architecture.latent else TransformerConfig)(
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
        qk_layernorm=architecture.qk_norm or architecture.latent is not None,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Every parameter is overwritten by load_hf, so there is nothing to initialise.
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        masked_softmax_fusion=False,
        bias_activation_fusion=not on_cpu,  # SwiGLU keeps its input only; without CUDA it would not be one kernel
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=True,
        persist_layer_norm=False,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        sequence_parallel=parallel.sequence and parallel.tp > 1,
        variable_seq_lengths=True,  # of the tensors between pipeline stages
        moe_token_dispatcher_type="alltoall",  # the one that takes such tensors
        batch_p2p_comm=not on_cpu,
        batch_p2p_sync=False,  # was for an error in old versions of torch
        **_recomputed(trainer.recompute, ["core_attn"] if on_cpu else ["mlp", *(["moe"] if architecture.mixture else [])]),
        **moe.config_keywords(architecture, parallel),
        **mla.config_keywords(architecture),
    )


def _recomputed(mode: Recompute, selected: list[str]) -> dict[str, Any]:
    """Keywords of TransformerConfig; `selected`: the modules that are made again with `selective`. On CPUs that is attention, which computes in
    float32; flash attention on GPUs keeps no more inside than its inputs, and the MLP takes more than all else."""
    match mode:
        case Recompute.none:
            return {}
        case Recompute.selective:
            return {"recompute_granularity": "selective", "recompute_modules": selected}
        case Recompute.full:
            return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def uses_transformer_engine() -> bool:
    """Whether layers are Transformer Engine's: where it is installed, and there is CUDA."""
    return torch.cuda.is_available() and gpt_layer_specs.HAVE_TE


def layer_specs(config: TransformerConfig, architecture: Architecture, piece: int = 0, norms_apart: bool = False) -> TransformerBlockSubmodules:
    """The layers of a `piece` of this pipeline stage: Transformer Engine's matrices and norms where it is installed, else Megatron-core's local ones.

    Transformer Engine has a norm and the matrix behind it in one, unless `norms_apart`: adapters need what lies between them.
    The attention is ours in both: theirs knows nothing of responses that share a prompt.
    """
    first, number = get_transformer_layer_offset(config, piece), get_num_layers_to_build(config, piece)
    if uses_transformer_engine():
        from megatron.core.extensions.transformer_engine import TENorm

        return TransformerBlockSubmodules([_fused_layer(config, architecture, layer, norms_apart) for layer in range(first, first + number)], TENorm)
    return TransformerBlockSubmodules([_local_layer(config, architecture, layer) for layer in range(first, first + number)], RMSNorm)


def _fused_layer(config: TransformerConfig, architecture: Architecture, number: int, norms_apart: bool) -> ModuleSpec:
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm, multi_latent_attention=architecture.latent is not None,
                                                       **moe.spec_keywords(architecture, number))
    _finish(layer, architecture, number, TENorm, TEColumnParallelLinear)
    if norms_apart:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TENorm
        layer.submodules.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        if not architecture.has_experts(number):
            layer.submodules.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    return layer


def _local_layer(config: TransformerConfig, architecture: Architecture, number: int) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, multi_latent_attention=architecture.latent is not None,
                                     normalization="RMSNorm", **moe.spec_keywords(architecture, number))
    if architecture.has_experts(number):
        # Transformer Engine's layers keep this norm apart where there are experts: a checkpoint of either is one of both.
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.", None)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    _finish(layer, architecture, number, RMSNorm, ColumnParallelLinear)
    if config.qk_layernorm and architecture.latent is None:
        layer.submodules.self_attention.submodules.q_layernorm = layer.submodules.self_attention.submodules.k_layernorm = RMSNorm
    return layer


def _finish(layer: ModuleSpec, architecture: Architecture, number: int, norm: type, matrix: type) -> None:
    """Put our modules in, whatever the others are; `norm` and `matrix` (split by its outputs) are theirs."""
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    layer.submodules.self_attention.module = PackedSelfAttention
    if architecture.latent is not None:
        mla.put_in(layer.submodules.self_attention, architecture, norm, matrix)
    if architecture.mixture is not None and architecture.has_experts(number):
        mlp = layer.submodules.mlp  # from Megatron-core 0.19 on no spec
        submodules = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
        submodules.router = moe.BiasedRouter if architecture.mixture.sigmoid else moe.Router

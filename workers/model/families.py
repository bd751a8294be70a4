"""The families of models: a row says what sets a family's layers apart, of parts that engine, trainer and estimates know.

The parts' sizes and tensors are in experts.py, latent_attention.py and architecture.py, the tensors' names in Megatron-core in
workers/trainer/megatron/hf_conversion/names.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.model.experts import MixtureOfExperts, sigmoid_experts, softmax_experts
from workers.model.latent_attention import LatentAttention


@dataclass(frozen=True)
class Family:
    """`qkv_bias` and `qk_norm` (biases of the query, key and value projections; queries and keys normalised per head) are yes, no, or the key of
    config.json that says it. `window` and `rotary_share` count where config.json has no sliding_window, no partial_rotary_factor."""

    name: str
    title: str
    qkv_bias: bool | str = False
    qk_norm: bool | str = False
    window: int | None = None
    rotary_share: float = 1.0
    experts: Callable[[dict], MixtureOfExperts] | None = None
    latent: Callable[[dict], LatentAttention] | None = None


FAMILIES = {
    "LlamaForCausalLM": Family("llama", "Llama"),
    "MistralForCausalLM": Family("mistral", "Mistral", window=4096),  # as transformers' MistralConfig
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2", qkv_bias=True),
    "Qwen3ForCausalLM": Family("qwen3", "Qwen3", qk_norm=True),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", "Qwen3-MoE", qk_norm=True, experts=softmax_experts),
    "Glm4MoeForCausalLM": Family("glm4_moe", "GLM-4.5", qkv_bias="attention_bias", qk_norm="use_qk_norm", rotary_share=0.5, experts=sigmoid_experts),
    "DeepseekV3ForCausalLM": Family("deepseek_v3", "DeepSeek-V3", experts=sigmoid_experts, latent=LatentAttention.read),
}
"""By the name in config.json's `architectures`."""
TITLES = ", ".join(family.title for family in FAMILIES.values())

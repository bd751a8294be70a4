"""Log-probs against Hugging Face for every architecture, with shapes that hypothesis draws: odd sizes, few and many heads, any vocabulary."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.hf_reference import load_reference, reference_logprobs  # noqa: E402
from tests.support.megatron_case import config, make_groups  # noqa: E402
from workers.trainer.megatron.engine import MegatronEngine  # noqa: E402

pytestmark = pytest.mark.usefixtures("megatron_groups")

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
SIGMOID = {"n_routed_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 8, "n_shared_experts": 1, "first_k_dense_replace": 0,
           "routed_scaling_factor": 2.0, "n_group": 3, "topk_group": 2}


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    return {
        # Llama's config wants a multiple of the heads.
        "vocab_size": draw(st.integers(97, 160)), "hidden_size": heads * draw(st.integers(2, 9)), "intermediate_size": draw(st.integers(5, 60)),
        "num_hidden_layers": draw(st.integers(1, 3)), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": draw(st.integers(1, 10)) * 2, "tie_word_embeddings": draw(st.booleans()), "max_position_embeddings": 512,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])), "attention_dropout": 0.0, "initializer_range": 0.3}


def grouped(shape: dict[str, Any]) -> None:
    """torch's grouped product, which the reference uses, takes multiples of 16 bytes."""
    for name in ("hidden_size", "intermediate_size"):
        shape[name] = -(-shape[name] // 4) * 4


def hf_config(family: str, shape: dict[str, Any]) -> Any:
    match family:
        case "llama":
            return transformers.LlamaConfig(rope_parameters=SCALED, **shape)
        case "mistral":
            return transformers.MistralConfig(sliding_window=None, rope_parameters=PLAIN, **shape)
        case "qwen2":
            heads = shape["num_attention_heads"]  # Qwen2 has no head_dim of its own
            return transformers.Qwen2Config(rope_parameters=PLAIN, **{**shape, "hidden_size": heads * shape.pop("head_dim")})
        case "qwen3":
            return transformers.Qwen3Config(rope_parameters=PLAIN, **shape)
        case "glm4_moe":
            grouped(shape)
            return transformers.Glm4MoeConfig(rope_parameters=PLAIN, attention_bias=True, use_qk_norm=shape["tie_word_embeddings"], **SIGMOID,
                                              **{**shape, "head_dim": 2 * shape["head_dim"]})
        case "deepseek_v3":
            grouped(shape)
            heads, size = shape["num_attention_heads"], shape.pop("head_dim")
            return transformers.DeepseekV3Config(
                rope_parameters=PLAIN, q_lora_rank=size + 3 if shape["tie_word_embeddings"] else None, kv_lora_rank=12, qk_rope_head_dim=size,
                qk_nope_head_dim=6, v_head_dim=9 if size > 2 else 5, rope_interleave=heads > 2, **SIGMOID, **{**shape, "num_key_value_heads": heads})
        case _:
            grouped(shape)
            return transformers.Qwen3MoeConfig(rope_parameters=PLAIN, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True,
                                               moe_intermediate_size=shape["intermediate_size"], decoder_sparse_step=1, mlp_only_layers=[], **shape)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"])
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shapes(), st.integers(0, 1000))
def test_logprobs_are_those_of_hugging_face(family: str, shape: dict[str, Any], seed: int) -> None:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(family, shape)).float()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        engine = MegatronEngine(config(), Path(folder))
        reference = load_reference(Path(folder))
    groups = make_groups(2, seed)
    logprobs, entropies = engine.logprobs_and_entropy(groups)
    for index, group in enumerate(groups):
        with torch.no_grad():
            expected = reference_logprobs(reference, group, 0.7)
        for sample in range(group.num_samples):
            assert np.abs(logprobs[index][sample] - expected[0][sample].numpy()).max() <= 1e-4
            assert np.abs(entropies[index][sample] - expected[1][sample].numpy()).max() <= 1e-4

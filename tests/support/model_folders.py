"""Model folders of every supported family, as transformers writes them, or just as large with random numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

from workers.model.architecture import Architecture, read_architecture

FAMILIES = {"llama": transformers.LlamaConfig, "mistral": transformers.MistralConfig, "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config, "qwen3_moe": transformers.Qwen3MoeConfig, "glm4_moe": transformers.Glm4MoeConfig,
            "deepseek_v3": transformers.DeepseekV3Config}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
SIGMOID_EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
                   "routed_scaling_factor": 1.7, "n_group": 4, "topk_group": 2, "norm_topk_prob": True}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0}


def hf_config(family: str, **changes: Any) -> Any:
    """transformers' config of a small model of `family`; experts come with "qwen3_moe", Llama 3's rotary scaling with "llama"."""
    values: dict[str, Any] = {
        "vocab_size": 53, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "attention_dropout": 0.0, "initializer_range": 0.2}
    if family == "llama":
        values["rope_parameters"] = LLAMA3_ROPE
    if family == "mistral":
        values["sliding_window"] = None
    if family == "qwen3_moe":
        values |= EXPERTS
    if family in ("glm4_moe", "deepseek_v3"):
        values |= SIGMOID_EXPERTS
    if family == "glm4_moe":
        values |= {"attention_bias": True, "use_qk_norm": True}
    if family == "deepseek_v3":
        values |= LATENT
        changes = {"num_key_value_heads": changes.get("num_attention_heads", 4), **changes}
    elif family not in ("qwen2", "llama"):
        values["head_dim"] = 12 if family == "glm4_moe" else 10
    return FAMILIES[family](**values | changes)


def write_hf_model(folder: Path, family: str, seed: int = 0, **changes: Any) -> Any:
    """Save a random float32 model, whose norms and biases matter, in `folder`; returns it."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(family, **changes)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.9, 0.3)
            elif name.endswith("mlp.gate.weight"):
                parameter.normal_(0.0, 1.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.save_pretrained(folder)
    return model


def write_random_model(folder: Path, family: str, seed: int = 0, files: int = 1, **changes: Any) -> Architecture:
    """The config and tensors of such a model, any float32 numbers, in `files` files, without making the model itself."""
    folder.mkdir(parents=True, exist_ok=True)
    config = hf_config(family, **changes)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    architecture = read_architecture(folder)
    rng = np.random.default_rng(seed)
    shapes = architecture.tensor_shapes() | architecture.frozen_shapes()
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for number in range(files):
        save_file(dict(list(tensors.items())[number::files]), folder / f"model-{number}.safetensors")
    return architecture

"""Small random models, whose distributions are far from uniform, as folders that every engine can serve; and folders with one fault each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB, EOS, SECOND_EOS = 260, 256, 257
CONTEXT = 1024
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "eos_token_id": EOS, "bos_token_id": None}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}
SIGMOID: dict[str, Any] = {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1,
                           "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2, "tie_word_embeddings": False}
LATENT: dict[str, Any] = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
                          "num_key_value_heads": 4, "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",  # as published
                          "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
                                              "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
    "glm4moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SHAPE, **SIGMOID, head_dim=32, attention_bias=True, use_qk_norm=True)),
    "deepseek": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE | SIGMOID | LATENT)),
}

MIXTURES = ("glm4moe", "deepseek")


def write_model(folder: Path, family: str, seed: int) -> Path:
    """A model of `family` with a tokenizer of 256 bytes and two specials."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.copy_((1 if "norm" in name else 0) + 0.3 * torch.randn_like(tensor))
            else:
                tensor.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of all models of a family: no update brings it
                buffer.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(7))
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, SECOND_EOS]}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    return folder


def endless(folder: Path) -> Path:
    """The same folder, of a model without any token that ends a response."""
    config, tokenizer = (json.loads((folder / name).read_text()) for name in ("config.json", "tokenizer_config.json"))
    del tokenizer["eos_token"]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "generation_config.json").unlink()
    return folder



def write_pair(folder: Path, family: str) -> tuple[Path, Path]:
    """Two models of one family with different weights."""
    return write_model(folder / "first", family, 0), write_model(folder / "second", family, 1)


def broken_folders(first: Path, work: Path) -> dict[str, Path]:
    """Copies of a model, each with one fault."""
    folders = {name: work / name for name in ("missing", "shape", "short", "type", "config", "nothing")}
    for name, folder in folders.items():
        if name != "nothing":
            shutil.copytree(first, folder)
    tensors = load_file(first / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, folders["missing"] / "model.safetensors")
    save_file(tensors | {name: tensors[name][:5].clone()}, folders["shape"] / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.int32)}, folders["type"] / "model.safetensors")
    whole = (first / "model.safetensors").read_bytes()
    (folders["short"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    config = json.loads((first / "config.json").read_text())
    (folders["config"] / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folders


def diverged_folder(first: Path, folder: Path) -> Path:
    """A copy of a model in which every number is NaN."""
    shutil.copytree(first, folder)
    tensors = load_file(first / "model.safetensors")
    save_file({key: torch.full_like(value, torch.nan) for key, value in tensors.items()}, folder / "model.safetensors")
    return folder


def prompt_of(length: int, start: int = 0) -> list[int]:
    """A prompt that differs from others with another `start` from its first token on."""
    return [(start * 31 + index * index * 7 + index) % 256 for index in range(length)]

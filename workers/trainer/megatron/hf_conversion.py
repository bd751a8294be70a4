"""Hugging Face tensors <-> Megatron-core parameters, for dense Llama, Qwen2 and Qwen3, one tensor at a time.

Megatron-core keeps query, key and value of each key/value head next to each other in one matrix, and gate and up
projections one after the other; all else is a change of names. Both directions only move numbers, so a round trip is
exact to the bit. Names are those of the local layer spec; each rank would hold its shard along the parameter's
partition dimension (tensor parallelism: split here, gather in the export).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workers.weights.architecture import Architecture, check_tensors

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


def hf_names(name: str) -> list[str]:
    """The Hugging Face tensors that make up the Megatron parameter `name`, in the order in which they are joined.

    Raises ValueError for a parameter that dense Llama, Qwen2 and Qwen3 models do not have.
    """
    if name in _TOP:
        return [_TOP[name]]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    layer, rest = (match[1], match[2]) if match else ("", "")
    prefix = f"model.layers.{layer}."
    if rest in _LAYER:
        return [prefix + _LAYER[rest]]
    if rest == "mlp.linear_fc1.weight":
        return [f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up")]
    if rest in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        return [f"{prefix}self_attn.{part}_proj.{rest.rsplit('.', 1)[1]}" for part in "qkv"]
    raise ValueError(f"Megatron parameter {name} has no counterpart in Hugging Face names. Supported are dense Llama, Qwen2 and Qwen3")


def join(parts: list[Tensor], architecture: Architecture) -> Tensor:
    """One Megatron parameter from the tensors of `hf_names`: 1 as it is, 2 gate and up, 3 query, key and value."""
    if len(parts) == 3:
        kv = architecture.num_kv_heads
        return torch.cat([part.reshape(kv, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def separate(parameter: Tensor, num_parts: int, architecture: Architecture) -> list[Tensor]:
    """The inverse of `join`."""
    if num_parts == 3:
        head, kv = architecture.head_dim, architecture.num_kv_heads
        rows = [head * architecture.num_heads // kv, head, head]
        by_head = parameter.reshape(kv, sum(rows), *parameter.shape[1:])
        return [part.flatten(0, 1) for part in by_head.split(rows, dim=1)]
    return [parameter] if num_parts == 1 else list(parameter.chunk(num_parts))


@torch.no_grad()
def load_hf(model: torch.nn.Module, folder: Path, architecture: Architecture) -> None:
    """Fill `model`'s parameters from the safetensors files in `folder`, tensor by tensor, in the parameters' dtype.

    Raises ModelError where a tensor is missing or of the wrong shape.
    """
    files = {}
    for path in check_tensors(folder, architecture):
        file = safe_open(path, framework="pt")
        files.update(dict.fromkeys(file.keys(), file))
    load_named(model, lambda name: files[name].get_tensor(name), architecture)


@torch.no_grad()
def load_named(model: torch.nn.Module, get: Callable[[str], Tensor], architecture: Architecture) -> None:
    """Fill `model`'s parameters from `get(Hugging Face name)`."""
    for name, parameter in model.named_parameters():
        parameter.copy_(join([get(part) for part in hf_names(name)], architecture))


@torch.no_grad()
def iter_hf_tensors(model: torch.nn.Module, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, contiguous tensor), one at a time, in the parameters' dtype, on their device.

    A tensor may share memory with the model: copy it before the next training step. A tied output layer is not listed.
    """
    for name, parameter in model.named_parameters():
        names = hf_names(name)
        for part_name, part in zip(names, separate(parameter.detach(), len(names), architecture), strict=True):
            yield part_name, part.contiguous()

"""Weights of a model folder in the layout the CPU kernels like best, built from safetensors files.

`load_weights` checks the whole folder before it reads a tensor and returns a new, complete set; the caller then swaps one
reference. So a failing update leaves the old weights serving, and no forward ever sees half an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from workers.model import dtypes
from workers.model.architecture import Architecture, ModelError
from workers.model.compatibility import check_complete, check_same_model


@dataclass(frozen=True)
class Matrix:
    """The weight of a linear layer, packed where this torch and this CPU can in its dtype, and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        """Pack `weight` [outputs, inputs]."""
        return cls(dtypes.pack(weight) if dtypes.packs(weight.dtype) else weight, bias)


def linear(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """x [tokens, inputs] times the transposed matrix, plus its bias: [tokens, outputs]."""
    if matrix.weight.is_mkldnn:
        return dtypes.packed_linear(x, matrix.weight, matrix.bias)
    return F.linear(x, matrix.weight, matrix.bias)


@dataclass(frozen=True)
class MLP:
    """A gated MLP, gate above up in one matrix."""

    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True)
class Experts:
    """The MLPs that stand in one layer of a mixture, and the router that chooses among them."""

    router: Matrix
    mlps: list[MLP]


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Norm weights are float32; `qk_norm` [heads + kv_heads, head_dim] holds those of every query and key head."""

    input_norm: torch.Tensor
    qkv: Matrix
    qk_norm: torch.Tensor | None
    output: Matrix
    mlp_norm: torch.Tensor
    mlp: MLP | Experts


@dataclass(frozen=True)
class Weights:
    """A whole model; `norm` is float32. With tied embeddings `head` is packed from the same tensor as `embedding`."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: Matrix


def load_weights(source: Path | Mapping[str, torch.Tensor], architecture: Architecture, dtype: torch.dtype) -> Weights:
    """A folder's tensors, or these, as `dtype`. Raises `ModelError` if they are not a complete model of exactly `architecture`."""
    tensors = _read(source, architecture) if isinstance(source, Path) else source
    check_complete(tensors, architecture)
    with torch.inference_mode():
        return _assemble(architecture, lambda name: tensors[name].to(dtype))


def _read(folder: Path, architecture: Architecture) -> dict[str, torch.Tensor]:
    files = check_same_model(folder, architecture)
    names = architecture.tensor_shapes()
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in names.keys() & set(opened.keys())})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder}: a safetensors file cannot be read ({error}). Write the folder again") from error
    return tensors


def _assemble(architecture: Architecture, get: Callable[[str], torch.Tensor]) -> Weights:
    # clone(): the files may be replaced or removed while these weights serve; packed matrices are copies anyway.
    embedding = get("model.embed_tokens.weight").clone()
    head = embedding if architecture.tied else get("lm_head.weight")
    layers = [_layer(architecture, f"model.layers.{index}.", get) for index in range(architecture.num_layers)]
    return Weights(embedding, layers, get("model.norm.weight").float().clone(), Matrix.of(head))


def _layer(architecture: Architecture, prefix: str, get: Callable[[str], torch.Tensor]) -> Layer:
    def pairs(name: str) -> torch.Tensor:
        """Reorder each head's rows from halves (0..n/2, n/2..n) to neighbouring pairs."""
        tensor = get(prefix + name)
        return tensor.unflatten(0, (-1, 2, architecture.head_dim // 2)).transpose(1, 2).reshape(tensor.shape)

    attention = prefix + "self_attn."
    qkv = torch.cat([pairs("self_attn.q_proj.weight"), pairs("self_attn.k_proj.weight"), get(attention + "v_proj.weight")])
    bias = qk_norm = None
    if architecture.qkv_bias:
        bias = torch.cat([pairs("self_attn.q_proj.bias"), pairs("self_attn.k_proj.bias"), get(attention + "v_proj.bias")])
    if architecture.qk_norm:
        qk_norm = torch.cat([pairs("self_attn.q_norm.weight").expand(architecture.num_heads, -1),
                             pairs("self_attn.k_norm.weight").expand(architecture.num_kv_heads, -1)]).float()
    return Layer(
        input_norm=get(prefix + "input_layernorm.weight").float().clone(),
        qkv=Matrix.of(qkv, bias),
        qk_norm=qk_norm,
        output=Matrix.of(get(attention + "o_proj.weight").contiguous()),
        mlp_norm=get(prefix + "post_attention_layernorm.weight").float().clone(),
        mlp=_mlp(prefix + "mlp.", get) if architecture.mixture is None else _experts(prefix + "mlp.", architecture.mixture.num_experts, get),
    )


def _mlp(prefix: str, get: Callable[[str], torch.Tensor]) -> MLP:
    gate_up = torch.cat([get(prefix + "gate_proj.weight"), get(prefix + "up_proj.weight")])
    return MLP(Matrix.of(gate_up), Matrix.of(get(prefix + "down_proj.weight").contiguous()))


def _experts(prefix: str, number: int, get: Callable[[str], torch.Tensor]) -> Experts:
    return Experts(Matrix.of(get(prefix + "gate.weight").contiguous()), [_mlp(f"{prefix}experts.{index}.", get) for index in range(number)])

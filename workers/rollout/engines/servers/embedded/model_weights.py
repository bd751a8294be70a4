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
    """The MLPs that stand in one layer of a mixture, the router that chooses among them, with the bias of its choice, and the one for all tokens."""

    router: Matrix
    bias: torch.Tensor | None
    mlps: list[MLP]
    shared: MLP | None


@dataclass(frozen=True)
class LatentQK:
    """What makes queries and the one key of latent attention; each is [rope | latent], and the key is the value, too.

    `down`: the latent queries, if any, above the key. `query`: of the latent queries, else of the layer's input; keys' part of kv_b_proj is in it.
    """

    down: Matrix
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor
    query: Matrix


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Norm weights are float32; `qk_norm` [heads + kv_heads, head_dim] holds those of every query and key head."""

    input_norm: torch.Tensor
    qkv: Matrix | LatentQK
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


def load_weights(source: Path | Mapping[str, torch.Tensor], architecture: Architecture, dtype: torch.dtype,
                 frozen: Mapping[str, torch.Tensor]) -> Weights:
    """A folder's tensors, or these, as `dtype`, and the `frozen` ones as they are. Raises `ModelError` if they are not a complete model of exactly
    `architecture`."""
    tensors = _read(source, architecture) if isinstance(source, Path) else source
    check_complete(tensors, architecture)
    with torch.inference_mode():
        embedding = tensors["model.embed_tokens.weight"].to(dtype, copy=True)
        return _assemble(architecture, embedding, lambda name: frozen[name] if name in frozen else tensors[name].to(dtype))


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


def _assemble(architecture: Architecture, embedding: torch.Tensor, get: Callable[[str], torch.Tensor]) -> Weights:
    # clone(): the files may be replaced or removed while these weights serve; packed matrices are copies anyway.
    head = embedding if architecture.tied else get("lm_head.weight")
    layers = [_layer(architecture, index, get) for index in range(architecture.num_layers)]
    return Weights(embedding, layers, get("model.norm.weight").float().clone(), Matrix.of(head))


def _pairs(rows: torch.Tensor, size: int, rotary: int) -> torch.Tensor:
    """`rows` of heads of `size`, of which each one's first `rotary` are reordered from halves (0..n/2, n/2..n) to neighbouring pairs."""
    heads = rows.unflatten(0, (-1, size))
    return torch.cat([heads[:, :rotary].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), heads[:, rotary:]], 1).flatten(0, 1)


def _layer(architecture: Architecture, index: int, get: Callable[[str], torch.Tensor]) -> Layer:
    prefix = f"model.layers.{index}."
    of_attention = _latent_attention if architecture.latent else _attention
    qkv, qk_norm, output = of_attention(architecture, prefix + "self_attn.", get)
    return Layer(
        input_norm=get(prefix + "input_layernorm.weight").float().clone(),
        qkv=qkv,
        qk_norm=qk_norm,
        output=output,
        mlp_norm=get(prefix + "post_attention_layernorm.weight").float().clone(),
        mlp=_experts(prefix + "mlp.", architecture, get) if architecture.has_experts(index) else _mlp(prefix + "mlp.", get),
    )


Attention = tuple[Matrix | LatentQK, torch.Tensor | None, Matrix]
"""A layer's qkv, qk_norm and output."""


def _attention(architecture: Architecture, prefix: str, get: Callable[[str], torch.Tensor]) -> Attention:
    def pairs(name: str) -> torch.Tensor:
        return _pairs(get(prefix + name), architecture.head_dim, architecture.rotary_dim)

    bias = qk_norm = None
    qkv = torch.cat([pairs("q_proj.weight"), pairs("k_proj.weight"), get(prefix + "v_proj.weight")])
    if architecture.qkv_bias:
        bias = torch.cat([pairs("q_proj.bias"), pairs("k_proj.bias"), get(prefix + "v_proj.bias")])
    if architecture.qk_norm:
        qk_norm = torch.cat([pairs("q_norm.weight").expand(architecture.num_heads, -1),
                             pairs("k_norm.weight").expand(architecture.num_kv_heads, -1)]).float()
    return Matrix.of(qkv, bias), qk_norm, Matrix.of(get(prefix + "o_proj.weight").contiguous())


def _latent_attention(architecture: Architecture, prefix: str, get: Callable[[str], torch.Tensor]) -> Attention:
    """kv_b_proj is absorbed by the matrices before and behind it (arXiv 2405.04434, Section 2.1.2)."""
    latent, heads = architecture.latent, architecture.num_heads
    assert latent is not None
    rope = latent.rope_dim

    def pairs(rows: torch.Tensor) -> torch.Tensor:
        return rows if latent.interleaved else _pairs(rows, rope, rope)

    query = get(prefix + ("q_b_proj.weight" if latent.query_rank else "q_proj.weight")).float().unflatten(0, (heads, -1))
    of_keys, of_values = get(prefix + "kv_b_proj.weight").float().unflatten(0, (heads, -1)).split([latent.nope_dim, latent.value_dim], 1)
    turned = pairs(query[:, latent.nope_dim:].flatten(0, 1)).unflatten(0, (heads, -1))
    query = torch.cat([turned, of_keys.transpose(1, 2) @ query[:, :latent.nope_dim]], 1).flatten(0, 1)
    output = get(prefix + "o_proj.weight")
    absorbed = torch.einsum("ohd,hdr->ohr", output.float().unflatten(1, (heads, -1)), of_values)
    down = get(prefix + "kv_a_proj_with_mqa.weight")
    rows, norm = [pairs(down[latent.kv_rank:]), down[:latent.kv_rank]], None
    if latent.query_rank:
        rows, norm = [get(prefix + "q_a_proj.weight"), *rows], get(prefix + "q_a_layernorm.weight").float().clone()
    qk = LatentQK(Matrix.of(torch.cat(rows)), norm, get(prefix + "kv_a_layernorm.weight").float().clone(), Matrix.of(query.to(output.dtype)))
    return qk, None, Matrix.of(F.pad(absorbed, (rope, 0)).flatten(1).to(output.dtype))


def _mlp(prefix: str, get: Callable[[str], torch.Tensor]) -> MLP:
    gate_up = torch.cat([get(prefix + "gate_proj.weight"), get(prefix + "up_proj.weight")])
    return MLP(Matrix.of(gate_up), Matrix.of(get(prefix + "down_proj.weight").contiguous()))


def _experts(prefix: str, architecture: Architecture, get: Callable[[str], torch.Tensor]) -> Experts:
    mixture = architecture.mixture
    assert mixture is not None
    return Experts(Matrix.of(get(prefix + "gate.weight").contiguous()), get(prefix + "gate.e_score_correction_bias") if mixture.sigmoid else None,
                   [_mlp(f"{prefix}experts.{index}.", get) for index in range(mixture.num_experts)],
                   _mlp(prefix + "shared_experts.", get) if mixture.shared_size else None)

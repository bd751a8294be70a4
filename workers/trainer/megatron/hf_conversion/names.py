"""Which Hugging Face tensors make up which Megatron-core parameter, and how ranks share it. Pure: no torch, no ranks.

Megatron's names are those of its local layer spec and of its Transformer Engine spec, which differ in where norms live and in how
experts are numbered.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

from workers.config import ParallelConfig
from workers.model.architecture import Architecture
from workers.model.families import TITLES


class Split(enum.Enum):
    """How tensor parallelism divides the Hugging Face tensors of a parameter: every rank all of it, or its share of a dimension."""

    none = None
    rows = 0
    columns = 1


@dataclass(frozen=True)
class HFTensors:
    """One parameter of the whole model: the Hugging Face tensors joined in it, in this order, and to which layer and expert it belongs.

    `layer` None: embedding, final norm or output layer. `expert` None: not an expert's.
    """

    names: tuple[str, ...]
    split: Split
    layer: int | None = None
    expert: int | None = None


_Rule = tuple[Split, tuple[str, ...]]
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_INPUT_NORM: _Rule = (Split.none, ("input_layernorm.weight",))
_MLP_NORM: _Rule = (Split.none, ("post_attention_layernorm.weight",))
_TOP: dict[str, _Rule] = {
    "embedding.word_embeddings.weight": (Split.rows, ("model.embed_tokens.weight",)),
    "output_layer.weight": (Split.rows, ("lm_head.weight",)),
    "decoder.final_layernorm.weight": (Split.none, ("model.norm.weight",)),
}
_LAYER: dict[str, _Rule] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,
    "self_attention.linear_qkv.weight": (Split.rows, tuple(f"{part}.weight" for part in _QKV)),
    "self_attention.linear_qkv.bias": (Split.rows, tuple(f"{part}.bias" for part in _QKV)),
    "self_attention.q_layernorm.weight": (Split.none, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": (Split.none, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": (Split.columns, ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,
    "mlp.linear_fc1.weight": (Split.rows, ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": (Split.columns, ("mlp.down_proj.weight",)),
    "mlp.router.weight": (Split.none, ("mlp.gate.weight",)),
    "mlp.shared_experts.linear_fc1.weight": (Split.rows, ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight")),
    "mlp.shared_experts.linear_fc2.weight": (Split.columns, ("mlp.shared_experts.down_proj.weight",)),
}
_LATENT: dict[str, _Rule] = {
    "self_attention.linear_q_proj.weight": (Split.rows, ("self_attn.q_proj.weight",)),
    "self_attention.linear_q_down_proj.weight": (Split.rows, ("self_attn.q_a_proj.weight",)),
    "self_attention.q_layernorm.weight": (Split.none, ("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": (Split.rows, ("self_attn.q_b_proj.weight",)),
    "self_attention.linear_kv_down_proj.weight": (Split.rows, ("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.kv_layernorm.weight": (Split.none, ("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": (Split.rows, ("self_attn.kv_b_proj.weight",)),
}
"""Of latent attention, in place of what has these names elsewhere."""
_EXPERT: dict[str, _Rule] = {
    "linear_fc1.weight": (Split.rows, ("gate_proj.weight", "up_proj.weight")),
    "linear_fc2.weight": (Split.columns, ("down_proj.weight",)),
}
_IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_IN_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(?P<local>\d+)\.(?P<rest>.+)|(?P<grouped>linear_fc\d\.weight)(?P<number>\d+))")
_HF_LAYER = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.+)")


def hf_tensors(name: str, first_layer: int = 0, first_expert: int = 0, latent: bool = False) -> HFTensors:
    """What makes up the Megatron parameter `name` of a rank whose layers and experts begin at `first_layer` and `first_expert`; `latent`: of a
    model with latent attention.

    Raises ValueError for a parameter that no supported model has.
    """
    if name in _TOP:
        split, parts = _TOP[name]
        return HFTensors(parts, split)
    in_layer = _IN_LAYER.fullmatch(name)
    layer, rest = (first_layer + int(in_layer[1]), in_layer[2]) if in_layer else (0, "")
    in_expert = _IN_EXPERT.fullmatch(rest)
    if in_expert and (leaf := in_expert["rest"] or in_expert["grouped"]) in _EXPERT:
        split, parts = _EXPERT[leaf]
        expert = first_expert + int(in_expert["local"] or in_expert["number"])
        return HFTensors(_with_prefix(f"model.layers.{layer}.mlp.experts.{expert}.", parts), split, layer, expert)
    if rest in (rules := _LAYER | (_LATENT if latent else {})):
        split, parts = rules[rest]
        return HFTensors(_with_prefix(f"model.layers.{layer}.", parts), split, layer)
    raise ValueError(f"Megatron parameter {name} has no counterpart in Hugging Face names. Supported are {TITLES}")


def _with_prefix(prefix: str, parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(prefix + part for part in parts)


def _by_first_part(*tables: dict[str, _Rule]) -> dict[str, _Rule]:
    return {parts[0]: (split, parts) for table in tables for split, parts in table.values()}


_PARTS = {latent: _by_first_part(_TOP, _LAYER, _EXPERT, _LATENT if latent else {}) for latent in (False, True)}


def all_hf_tensors(architecture: Architecture) -> Iterator[HFTensors]:
    """The parameters of the whole model, in one order: every tensor of `architecture.tensor_shapes()` is in exactly one.

    Raises ValueError for a tensor that no parameter holds.
    """
    by_first_part = _PARTS[architecture.latent is not None]
    later_parts = {part for _, parts in by_first_part.values() for part in parts[1:]}
    for name in architecture.tensor_shapes():
        match = _HF_LAYER.fullmatch(name)
        leaf = match[3] if match else name
        if leaf in later_parts:
            continue
        if leaf not in by_first_part:
            raise ValueError(f"Hugging Face tensor {name} has no counterpart among Megatron's parameters")
        split, parts = by_first_part[leaf]
        expert = int(match[2]) if match and match[2] else None
        yield HFTensors(_with_prefix(name.removesuffix(leaf), parts), split, int(match[1]) if match else None, expert)


def stage_of(tensors: HFTensors, num_layers: int, num_stages: int, num_pieces: int = 1) -> int:
    """The pipeline stage that has `tensors`: layers are dealt out in equal parts, one after the other, `num_pieces` to each stage; the last stage has
    what comes after them."""
    if tensors.layer is not None:
        return tensors.layer * num_stages * num_pieces // num_layers % num_stages
    return 0 if tensors.names == ("model.embed_tokens.weight",) else num_stages - 1


def expert_rank_of(tensors: HFTensors, architecture: Architecture, num_ranks: int) -> int:
    """Which of the `num_ranks` ranks of expert parallelism has `tensors`; what is no expert's is on all of them, and counts as the first's."""
    if tensors.expert is None or architecture.mixture is None:
        return 0
    return tensors.expert * num_ranks // architecture.mixture.num_experts


def share_of(shape: tuple[int, ...], split: Split, rank: int, size: int) -> tuple[slice, ...]:
    """Where the share of `rank` out of `size` lies in a tensor of `shape`.

    Shares are as long as the first one except at the end, where what is left may be less, or nothing: that is padding.
    """
    where = [slice(0, length) for length in shape]
    if split is not Split.none:
        length = -(-shape[split.value] // size)
        where[split.value] = slice(min(rank * length, shape[split.value]), min((rank + 1) * length, shape[split.value]))
    return tuple(where)


def sources(architecture: Architecture, parallel: ParallelConfig) -> dict[str, int]:
    """Who publishes each Hugging Face tensor, in the order of `architecture`: rank e of expert parallelism in stage s is s * ep + e."""
    found = {name: stage_of(tensors, architecture.num_layers, parallel.pp, parallel.vpp) * parallel.ep
             + expert_rank_of(tensors, architecture, parallel.ep) for tensors in all_hf_tensors(architecture) for name in tensors.names}
    return {name: found[name] for name in architecture.tensor_shapes()}

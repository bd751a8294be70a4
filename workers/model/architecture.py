"""What a Hugging Face model is, read from its folder's config.json, without torch. Its tensors: tensors.py.

The engine, the trainer and the checks before submission all read a model folder through here, so that all three
accept and refuse the same models with the same words.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from workers.config import RoutingShape
from workers.model.experts import MixtureOfExperts, mlp_shapes
from workers.model.families import FAMILIES, Family
from workers.model.latent_attention import LatentAttention

LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN_ROPE = {"beta_fast": 32.0, "beta_slow": 1.0}
"""What transformers takes where config.json does not say it."""
SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_hidden_layers": "num_layers",
         "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
         "max_position_embeddings": "max_positions"}
EXPERT_SIZES = {"num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "intermediate_size"}


class ModelError(ValueError):
    """A model folder that cannot be used. Its text names the folder, what is wrong and the remedy."""


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder of one of FAMILIES, in Hugging Face's terms.

    `max_positions`: the longest sequence on which plain causal attention is what the model does, so at most its sliding window.
    `rotary_share`: of a head's numbers, those that are rotated, from its first on. `mixture`: the experts in the place of layers' MLPs, if any;
    `intermediate_size` is that of the other layers. `latent`: the attention, if it is of that kind; `head_dim` is then that of queries and keys,
    each of which has a head of its own.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    tied: bool
    rope_theta: float
    rope_scaling: dict[str, float] | None
    eos_token_ids: tuple[int, ...]
    mixture: MixtureOfExperts | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    rotary_share: float = 1.0
    latent: LatentAttention | None = None

    @property
    def rotary_dim(self) -> int:
        """Of a head's numbers, how many are rotated."""
        return self.latent.rope_dim if self.latent else int(self.head_dim * self.rotary_share)

    @property
    def cache_width(self) -> int:
        """Numbers that attention keeps of a token in each layer: keys and values, or what they are made of."""
        return self.latent.kv_rank + self.latent.rope_dim if self.latent else 2 * self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """What products of queries and keys are multiplied by; YaRN's stretched positions sharpen it (arXiv 2309.00071, Equation 22)."""
        yarn = self.rope_scaling if self.rope_scaling and "mscale" in self.rope_scaling else None
        sharper = 0.1 * yarn["mscale"] * math.log(yarn["factor"]) + 1.0 if yarn and yarn["factor"] > 1 else 1.0
        return self.head_dim**-0.5 * sharper**2

    def has_experts(self, layer: int) -> bool:
        """Whether a mixture stands in place of the MLP of `layer`, counted from 0."""
        return self.mixture is not None and layer >= self.mixture.num_dense

    @property
    def routing(self) -> RoutingShape:
        """Of the choice of experts for a token."""
        mixture = self.mixture
        return RoutingShape() if mixture is None else RoutingShape(
            self.num_layers - mixture.num_dense, mixture.num_dense, mixture.experts_per_token, mixture.num_experts)

    def frozen_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors of the folder that nothing trains, by Hugging Face name: who needs them keeps the starting model's, in float32 (frozen.py)."""
        if self.mixture is None or not self.mixture.sigmoid:
            return {}
        return {f"model.layers.{index}.mlp.gate.e_score_correction_bias": (self.mixture.num_experts,)
                for index in range(self.mixture.num_dense, self.num_layers)}

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding where `tp` ranks share them evenly: the vocabulary, rounded up to a multiple of `tp`."""
        return -(-self.vocab_size // tp) * tp

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that training may move, by Hugging Face name, with its shape."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for index in range(self.num_layers):
            layer = f"model.layers.{index}."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
            attention, mlp = layer + "self_attn.", layer + "mlp."
            shapes |= self.latent.tensor_shapes(attention, hidden, self.num_heads) if self.latent else self._attention_shapes(attention)
            experts = self.mixture if self.has_experts(index) else None
            shapes |= experts.tensor_shapes(mlp, hidden) if experts else mlp_shapes(mlp, hidden, self.intermediate_size)
        return shapes

    def _attention_shapes(self, attention: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        rows = {"q": self.num_heads * self.head_dim, "k": self.num_kv_heads * self.head_dim, "v": self.num_kv_heads * self.head_dim}
        for name, num_rows in rows.items():
            shapes[f"{attention}{name}_proj.weight"] = (num_rows, self.hidden_size)
            if self.qkv_bias:
                shapes[f"{attention}{name}_proj.bias"] = (num_rows,)
        if self.qk_norm:
            shapes |= {attention + "q_norm.weight": (self.head_dim,), attention + "k_norm.weight": (self.head_dim,)}
        return shapes | {attention + "o_proj.weight": (self.hidden_size, rows["q"])}


def read_architecture(folder: Path) -> Architecture:
    """Read and check `folder`/config.json. Raises `ModelError` where it is missing, broken or unsupported."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        why = "there is no such file" if folder.is_dir() else "there is no such folder"
        raise ModelError(f"{folder}: no readable config.json ({why}). Give the folder of a Hugging Face model") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no readable config.json ({error}). Give the folder of a Hugging Face model") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{folder}: no readable config.json (it holds no object). Give the folder of a Hugging Face model")
    names = raw.get("architectures") or ["none"]
    if names[0] not in FAMILIES:
        raise ModelError(f"{folder}: architecture {names[0]!r} is not supported. Supported are {', '.join(FAMILIES)}")
    try:
        architecture = _architecture(FAMILIES[names[0]], raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: value {error} is missing or of the wrong type. Take the config.json that came with the model") from error
    _check(folder, raw, FAMILIES[names[0]], architecture)
    return architecture


def _rope(family: Family, raw: dict) -> tuple[float, float, dict[str, float] | None]:
    """Theta, the share of a head that is rotated, and the scaling."""
    # transformers >= 5 writes rope_parameters; older versions rope_theta and rope_scaling.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = float(rope.pop("rope_theta", raw.get("rope_theta", 10000.0)))
    share = float(rope.pop("partial_rotary_factor", raw.get("partial_rotary_factor", family.rotary_share)))
    if kind == "llama3":
        return theta, share, {key: float(rope[key]) for key in LLAMA3_ROPE}
    plain = rope.get("mscale") == rope.get("mscale_all_dim") and rope.get("attention_factor") is None  # else it scales rotations, too
    if kind == "yarn" and family.latent and rope.get("mscale") and plain:
        given = {key: float(rope[key]) for key in ("factor", "original_max_position_embeddings", "mscale")}
        return theta, share, given | {key: float(rope.get(key) or default) for key, default in YARN_ROPE.items()}
    if kind != "default":
        raise ModelError(f"rope type {kind!r} is not supported. Supported are 'default' and 'llama3', and for latent attention 'yarn' with an "
                         "mscale that is mscale_all_dim")
    return theta, share, None


def _architecture(family: Family, raw: dict) -> Architecture:
    theta, share, scaling = _rope(family, raw)
    eos = raw.get("eos_token_id")
    heads = max(0, int(raw["num_attention_heads"]))
    latent = family.latent(raw) if family.latent else None

    def said(switch: bool | str) -> bool:
        return bool(raw.get(switch)) if isinstance(switch, str) else switch

    return Architecture(
        family=family.name,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=heads if latent else int(raw.get("num_key_value_heads") or heads),
        head_dim=latent.head_dim if latent else int(raw.get("head_dim") or int(raw["hidden_size"]) // max(1, heads)),
        max_positions=_longest(family, raw),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=scaling,
        eos_token_ids=() if eos is None else tuple(int(token) for token in (eos if isinstance(eos, list) else [eos])),
        mixture=family.experts(raw) if family.experts else None,
        qkv_bias=said(family.qkv_bias),
        qk_norm=said(family.qk_norm),
        rotary_share=share,
        latent=latent,
    )


def _longest(family: Family, raw: dict) -> int:
    """Positions within which every token sees all earlier ones: Mistral's layers look back `sliding_window` tokens only."""
    positions = int(raw["max_position_embeddings"])
    window = raw.get("sliding_window", family.window) if family.window else None
    return positions if window is None else min(positions, int(window))


def _check(folder: Path, raw: dict, family: Family, architecture: Architecture) -> None:
    unsupported = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")) and family.qkv_bias != "attention_bias",
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in raw.get("layer_types") or ()),
        "decoder_sparse_step": raw.get("decoder_sparse_step") not in (None, 1),
        "mlp_only_layers": bool(raw.get("mlp_only_layers")),
        "quantization_config": bool(raw.get("quantization_config")),
        "scoring_func": raw.get("scoring_func") not in (None, "sigmoid"),
        "topk_method": raw.get("topk_method") not in (None, "noaux_tc"),
        "moe_layer_freq": raw.get("moe_layer_freq") not in (None, 1),
    }
    for key, found in unsupported.items():
        if found:
            raise ModelError(f"{folder}: {key}={raw[key]!r} is not supported. Use a model without it")
    sizes = {key: getattr(architecture, name) for key, name in SIZES.items()}
    if architecture.mixture is not None:
        sizes |= {key: getattr(architecture.mixture, name) for key, name in EXPERT_SIZES.items()}
    for key, size in sizes.items():
        if size < 1:
            raise ModelError(f"{folder}: {key}={raw.get(key)!r} must be at least 1. Take the config.json that came with the model")
    if architecture.head_dim % 2 or architecture.rotary_dim % 2 or not 0 < architecture.rotary_dim <= architecture.head_dim:
        raise ModelError(f"{folder}: head_dim={architecture.head_dim} must be even, and so must the {architecture.rotary_dim} of it that are "
                         "rotated: rotary positions turn pairs of numbers. Take the config.json that came with the model")
    for part in (architecture.latent, architecture.mixture):
        for problem in part.problems(architecture.num_layers) if part else ():
            raise ModelError(f"{folder}: {problem}. Take another model")
    if architecture.num_heads % architecture.num_kv_heads:
        raise ModelError(f"{folder}: num_attention_heads={architecture.num_heads} must be a multiple of "
                         f"num_key_value_heads={architecture.num_kv_heads}. Take the config.json that came with the model")

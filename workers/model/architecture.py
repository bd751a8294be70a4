"""What a Hugging Face model is, read from its folder's config.json, without torch. Its tensors: tensors.py.

The engine, the trainer and the checks before submission all read a model folder through here, so that all three
accept and refuse the same models with the same words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

SUPPORTED = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3",
             "Qwen3MoeForCausalLM": "qwen3_moe"}
MISTRAL_WINDOW = 4096
"""What transformers' MistralConfig takes where config.json names no sliding_window."""
LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
SIZES = {"vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size", "num_hidden_layers": "num_layers",
         "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim",
         "max_position_embeddings": "max_positions"}
EXPERT_SIZES = {"num_experts": "num_experts", "num_experts_per_tok": "experts_per_token", "moe_intermediate_size": "intermediate_size"}


class ModelError(ValueError):
    """A model folder that cannot be used. Its text names the folder, what is wrong and the remedy."""


@dataclass(frozen=True)
class MixtureOfExperts:
    """The MLPs of a mixture: each token goes to the `experts_per_token` of `num_experts` that its router finds most probable.

    Their outputs are weighted by these probabilities, which `normalized` scales to a sum of 1 (norm_topk_prob).
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalized: bool


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder (Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE), in Hugging Face's terms.

    `max_positions`: the longest sequence on which plain causal attention is what the model does, so at most its sliding window.
    `mixture`: the experts in the place of every layer's MLP, if any; `intermediate_size` then says nothing.
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

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are RMS-normalised per head."""
        return self.family in ("qwen3", "qwen3_moe")

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding where `tp` ranks share them evenly: the vocabulary, rounded up to a multiple of `tp`."""
        return -(-self.vocab_size // tp) * tp

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a folder of this architecture must hold, by Hugging Face name, with its shape."""
        hidden, head = self.hidden_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        rows = {"q": self.num_heads * head, "k": self.num_kv_heads * head, "v": self.num_kv_heads * head}
        for index in range(self.num_layers):
            layer = f"model.layers.{index}."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
            for name, num_rows in rows.items():
                shapes[f"{layer}self_attn.{name}_proj.weight"] = (num_rows, hidden)
                if self.qkv_bias:
                    shapes[f"{layer}self_attn.{name}_proj.bias"] = (num_rows,)
            if self.qk_norm:
                shapes[layer + "self_attn.q_norm.weight"] = (head,)
                shapes[layer + "self_attn.k_norm.weight"] = (head,)
            shapes[layer + "self_attn.o_proj.weight"] = (hidden, rows["q"])
            if self.mixture is None:
                shapes |= _mlp_shapes(layer + "mlp.", hidden, self.intermediate_size)
                continue
            shapes[layer + "mlp.gate.weight"] = (self.mixture.num_experts, hidden)
            for expert in range(self.mixture.num_experts):
                shapes |= _mlp_shapes(f"{layer}mlp.experts.{expert}.", hidden, self.mixture.intermediate_size)
        return shapes


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {prefix + "gate_proj.weight": (inner, hidden), prefix + "up_proj.weight": (inner, hidden), prefix + "down_proj.weight": (hidden, inner)}


def read_architecture(folder: Path) -> Architecture:
    """Read and check `folder`/config.json. Raises `ModelError` where it is missing, broken or unsupported."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        why = "there is no such file" if folder.is_dir() else "there is no such folder"
        raise ModelError(f"{folder}: no readable config.json ({why}). Give the folder of a Hugging Face model") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: no readable config.json ({error}). Give the folder of a Hugging Face model") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{folder}: no readable config.json (it holds no object). Give the folder of a Hugging Face model")
    names = raw.get("architectures") or ["none"]
    if names[0] not in SUPPORTED:
        raise ModelError(f"{folder}: architecture {names[0]!r} is not supported. Supported are {', '.join(sorted(SUPPORTED))}")
    try:
        architecture = _architecture(SUPPORTED[names[0]], raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: value {error} is missing or of the wrong type. Take the config.json that came with the model") from error
    _check(folder, raw, architecture)
    return architecture


def _architecture(family: str, raw: dict) -> Architecture:
    # transformers >= 5 writes rope_parameters; older versions rope_theta and rope_scaling.
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    theta = float(rope.pop("rope_theta", raw.get("rope_theta", 10000.0)))
    if kind not in ("default", "llama3"):
        raise ModelError(f"rope type {kind!r} is not supported. Supported are 'default' and 'llama3'")
    if kind == "llama3":
        rope = {key: float(rope[key]) for key in LLAMA3_ROPE}
    eos = raw.get("eos_token_id")
    heads = max(0, int(raw["num_attention_heads"]))
    return Architecture(
        family=family,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_layers=int(raw["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // max(1, heads)),
        max_positions=_longest(family, raw),
        rms_norm_eps=float(raw["rms_norm_eps"]),
        tied=bool(raw.get("tie_word_embeddings", False)),
        rope_theta=theta,
        rope_scaling=rope if kind == "llama3" else None,
        eos_token_ids=() if eos is None else tuple(int(token) for token in (eos if isinstance(eos, list) else [eos])),
        mixture=_mixture(raw) if family == "qwen3_moe" else None,
    )


def _longest(family: str, raw: dict) -> int:
    """Positions within which every token sees all earlier ones: Mistral's layers look back `sliding_window` tokens only."""
    positions = int(raw["max_position_embeddings"])
    window = raw.get("sliding_window", MISTRAL_WINDOW) if family == "mistral" else None
    return positions if window is None else min(positions, int(window))


def _mixture(raw: dict) -> MixtureOfExperts:
    number = "num_local_experts" if "num_local_experts" in raw else "num_experts"  # transformers >= 5 writes the first
    return MixtureOfExperts(
        num_experts=int(raw[number]),
        experts_per_token=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        normalized=bool(raw.get("norm_topk_prob", False)),
    )


def _check(folder: Path, raw: dict, architecture: Architecture) -> None:
    unsupported = {
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(raw.get("attention_bias")),
        "mlp_bias": bool(raw.get("mlp_bias")),
        "use_sliding_window": bool(raw.get("use_sliding_window")),
        "layer_types": any(kind != "full_attention" for kind in raw.get("layer_types") or ()),
        "decoder_sparse_step": raw.get("decoder_sparse_step") not in (None, 1),
        "mlp_only_layers": bool(raw.get("mlp_only_layers")),
        "quantization_config": bool(raw.get("quantization_config")),
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
    if architecture.head_dim % 2:
        raise ModelError(f"{folder}: head_dim={architecture.head_dim} must be even: rotary positions turn pairs of numbers. "
                         "Take the config.json that came with the model")
    mixture = architecture.mixture
    if mixture and not (2 if mixture.normalized else 1) <= mixture.experts_per_token <= mixture.num_experts:
        raise ModelError(f"{folder}: num_experts_per_tok={mixture.experts_per_token} must be from 1 (with norm_topk_prob from 2: one weight is "
                         f"always 1, and its router never learns) to num_experts={mixture.num_experts}. Take another model")
    if architecture.num_heads % architecture.num_kv_heads:
        raise ModelError(f"{folder}: num_attention_heads={architecture.num_heads} must be a multiple of "
                         f"num_key_value_heads={architecture.num_kv_heads}. Take the config.json that came with the model")

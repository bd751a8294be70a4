"""The mixture of experts that stands in place of a layer's MLP, as config.json says it, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NUMBERS = ("num_local_experts", "n_routed_experts", "num_experts")
"""What config.json may call the number of experts; transformers >= 5 also writes the first for those that had another."""


@dataclass(frozen=True)
class MixtureOfExperts:
    """The MLPs of a mixture: each token goes to the `experts_per_token` of `num_experts` that its router finds most probable.

    Their outputs are weighted by these probabilities, which `normalized` scales to a sum of 1 (norm_topk_prob). With `sigmoid` they are those of
    each expert alone: the choice adds a bias to them that is never trained, and is within the best `groups_per_token` of `num_groups`
    (arXiv 2412.19437, Section 2.1.2); the weights come times `scale`. `shared_size`: of one more MLP, which all tokens pass (0: none). The first
    `num_dense` layers have a plain MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalized: bool
    sigmoid: bool = False
    num_dense: int = 0
    shared_size: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0

    def problems(self, num_layers: int) -> Iterator[str]:
        """What cannot be served or trained of it, in a model of so many layers."""
        if not (2 if self.normalized else 1) <= self.experts_per_token <= self.num_experts:
            yield (f"num_experts_per_tok={self.experts_per_token} must be from 1 (with norm_topk_prob from 2: one weight is always 1, and its router "
                   f"never learns) to num_experts={self.num_experts}")
        if not 0 <= self.num_dense < num_layers:
            yield f"first_k_dense_replace={self.num_dense} must be less than num_hidden_layers={num_layers}: no layer has experts"
        if self.sigmoid and not self.normalized:
            yield "norm_topk_prob=False is not supported: the weights of experts chosen by sigmoid are normalized"
        if self.limited and (self.num_experts % self.num_groups or self.num_experts < 2 * self.num_groups):
            yield f"n_group={self.num_groups} must divide n_routed_experts={self.num_experts}, into groups of at least 2"
        if self.limited and self.experts_per_token != 2 * self.groups_per_token:
            yield (f"num_experts_per_tok={self.experts_per_token} must be twice topk_group={self.groups_per_token}: Megatron-core chooses groups by "
                   "their best num_experts_per_tok / topk_group experts, the model by their best two")

    @property
    def limited(self) -> bool:
        """Whether a token's experts are of some groups only."""
        return self.groups_per_token < self.num_groups

    def tensor_shapes(self, mlp: str, hidden: int) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer's mixture that training moves, by names that begin with `mlp`."""
        shapes: dict[str, tuple[int, ...]] = {mlp + "gate.weight": (self.num_experts, hidden)}
        if self.shared_size:
            shapes |= mlp_shapes(mlp + "shared_experts.", hidden, self.shared_size)
        for expert in range(self.num_experts):
            shapes |= mlp_shapes(f"{mlp}experts.{expert}.", hidden, self.intermediate_size)
        return shapes


def mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a gated MLP, by names that begin with `prefix`."""
    return {prefix + "gate_proj.weight": (inner, hidden), prefix + "up_proj.weight": (inner, hidden), prefix + "down_proj.weight": (hidden, inner)}


def softmax_experts(raw: dict) -> MixtureOfExperts:
    """Of Qwen3-MoE's config.json. Raises KeyError, TypeError, ValueError."""
    number = next(name for name in NUMBERS if name in raw or name == NUMBERS[-1])
    return MixtureOfExperts(num_experts=int(raw[number]), experts_per_token=int(raw["num_experts_per_tok"]),
                            intermediate_size=int(raw["moe_intermediate_size"]), normalized=bool(raw.get("norm_topk_prob", False)))


def sigmoid_experts(raw: dict) -> MixtureOfExperts:
    """Of the config.json of DeepSeek-V3 and GLM-4.5. Raises as `softmax_experts`."""
    plain = softmax_experts({"norm_topk_prob": True, **raw})
    return MixtureOfExperts(
        plain.num_experts, plain.experts_per_token, plain.intermediate_size, plain.normalized, sigmoid=True,
        num_dense=int(raw["first_k_dense_replace"]), shared_size=int(raw["n_shared_experts"] or 0) * plain.intermediate_size,
        num_groups=int(raw["n_group"]), groups_per_token=int(raw["topk_group"]), scale=float(raw["routed_scaling_factor"]))

"""Latent attention, as config.json says it, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NORM_EPS = 1e-6
"""Of the norms of what is latent: transformers does not take rms_norm_eps for them."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, Section 2.1): keys and values of all heads are made of `kv_rank` numbers a token.

    A head's query and key have `nope_dim` numbers made from the latent ones, and behind them `rope_dim` that are rotated, of which the key's are
    the same for all heads. Values have `value_dim`. `query_rank`: of the queries' latent numbers; 0: queries have none. `interleaved`: the numbers
    that are rotated together are neighbours.
    """

    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool

    @classmethod
    def read(cls, raw: dict) -> LatentAttention:
        """Of DeepSeek-V3's config.json. Raises KeyError, TypeError, ValueError."""
        return cls(query_rank=int(raw["q_lora_rank"] or 0), kv_rank=int(raw["kv_lora_rank"]), nope_dim=int(raw["qk_nope_head_dim"]),
                   rope_dim=int(raw["qk_rope_head_dim"]), value_dim=int(raw["v_head_dim"]), interleaved=bool(raw.get("rope_interleave", True)))

    def problems(self, num_layers: int) -> Iterator[str]:
        """What cannot be served or trained of it."""
        if min(self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim) < 1 or self.query_rank < 0:
            yield f"kv_lora_rank={self.kv_rank}, qk_nope_head_dim={self.nope_dim} and v_head_dim={self.value_dim} must be at least 1"
        if self.kv_rank % 2:
            yield f"kv_lora_rank={self.kv_rank} must be even"
        if self.value_dim > self.head_dim:
            yield f"v_head_dim={self.value_dim} must be at most qk_nope_head_dim + qk_rope_head_dim={self.head_dim}"

    @property
    def head_dim(self) -> int:
        """Of a query, and of a key."""
        return self.nope_dim + self.rope_dim

    def tensor_shapes(self, attention: str, hidden: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """The tensors of one layer's attention, by names that begin with `attention`."""
        queries, rank = num_heads * self.head_dim, self.query_rank
        of_queries: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, hidden)}
        if rank:
            of_queries = {"q_a_proj.weight": (rank, hidden), "q_a_layernorm.weight": (rank,), "q_b_proj.weight": (queries, rank)}
        shapes = of_queries | {
            "kv_a_proj_with_mqa.weight": (self.kv_rank + self.rope_dim, hidden), "kv_a_layernorm.weight": (self.kv_rank,),
            "kv_b_proj.weight": (num_heads * (self.nope_dim + self.value_dim), self.kv_rank), "o_proj.weight": (hidden, num_heads * self.value_dim)}
        return {attention + name: shape for name, shape in shapes.items()}

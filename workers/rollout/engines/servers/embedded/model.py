"""A decoder of any family (workers/model/families.py) on CPU, written for decode speed: packed weights, fused projections, a row KV cache.

Against the usual modelling code:
- query, key and value are one matrix, gate and up are one matrix, packed once into oneDNN's blocked layout
  (`model_weights.py`), which makes small batches 20-70% faster;
- query and key rows are reordered when loaded so that the two halves of a rotary pair are neighbours. A rotation is then
  one complex multiplication, and dot products do not change, as both sides are reordered alike;
- latent attention is attention with one key/value head of [rope | latent] numbers, which is key and value: the matrices that make keys and
  values of it are multiplied into their neighbours when loaded;
- the KV cache of a layer is [2 or 1, rows + 1, kv_heads, capacity, head_dim] with `capacity` just above the longest sequence,
  so that the decoded rows' keys are one contiguous block for a batched matrix product;
- with bfloat16 weights the residual stream, the norms and the rotations stay float32, which is faster (bfloat16
  reductions are slow on CPU) and nearer to the exact result;
- the experts of a mixture are gone through one by one, each with the tokens that were routed to it;
- prefill writes KV only; logits are computed by decode steps only (see scheduler.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from workers.model.architecture import Architecture
from workers.model.frozen import read_frozen
from workers.model.latent_attention import NORM_EPS
from workers.model.rope import inverse_frequencies
from workers.rollout.engines.servers.embedded.model_weights import MLP, Experts, LatentQK, Layer, Weights, linear, load_weights
from workers.rollout.engines.servers.embedded.requests import Copy, Segment


@dataclass(frozen=True)
class PrefillPart:
    """One segment within a prefill batch: its token range [first, last) there, and what it attends to."""

    first: int
    last: int
    row: int
    end: int
    mask: torch.Tensor  # [group * tokens, end], additive


class Model:
    """Weights and KV cache for `num_rows` sequences. All calls but `load_weights` come from one thread; no gradients.
    `tells_routing`: the experts of a mixture that tokens are sent to are kept until `take_routing`."""

    def __init__(self, folder: Path, architecture: Architecture, dtype: torch.dtype, num_rows: int, context_length: int,
                 tells_routing: bool = False) -> None:
        self.architecture = architecture
        self.dtype = dtype
        self.num_rows = num_rows
        self._chosen: list[torch.Tensor] | None = [] if tells_routing and architecture.mixture else None
        self._frozen = read_frozen(folder, architecture)
        self.weights: Weights = load_weights(folder, architecture, dtype, self._frozen)
        self.capacity = 0
        self.kv: list[torch.Tensor] = []
        self._heads = architecture.num_heads
        self._kv_heads = 1 if architecture.latent else architecture.num_kv_heads
        self._planes = 1 if architecture.latent else 2
        self._size = architecture.cache_width // (self._planes * self._kv_heads)
        self._group = self._heads // self._kv_heads
        self._scale = architecture.attention_scale
        angles = torch.outer(torch.arange(context_length + 1).float(), inverse_frequencies(architecture))
        self._rotations = torch.polar(torch.ones_like(angles), angles)  # complex64 [position, rotary_dim / 2]
        self._allocate(0)

    def load_weights(self, source: Path | Mapping[str, torch.Tensor]) -> Weights:
        """A folder's tensors, or these, beside the present ones; from any thread. Raises `ModelError` if they are not all of this model's."""
        return load_weights(source, self.architecture, self.dtype, self._frozen)

    def use_weights(self, weights: Weights, keep_cache: bool) -> None:
        """Compute with `weights` from now on.

        Unless `keep_cache`, the KV cache starts again from zeros: after diverged weights it may hold NaN, and masked
        positions must be finite.
        """
        self.weights = weights
        if not keep_cache:
            self._allocate(0)

    def apply(self, copies: Sequence[Copy], capacity: int) -> None:
        """Carry out `copies` in order, then make the cache hold `capacity` positions a row."""
        for source, target, length in copies:
            for cache in self.kv:
                cache[:, target, :, :length] = cache[:, source, :, :length]
        if capacity != self.capacity:
            self._allocate(capacity)

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment]) -> None:
        """Write the KV of `segments`, ragged, in one pass."""
        ids = torch.tensor([token for segment in segments for token in segment.tokens])
        positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in segments])
        rows = torch.cat([torch.full((len(s.tokens),), s.row) for s in segments])
        rotations, where = self._rotations[positions][:, None], self._cache_index(rows, positions)
        parts, first = [], 0
        for segment in segments:
            parts.append(self._part(segment, first))
            first += len(segment.tokens)
        x = F.embedding(ids, self.weights.embedding).float()
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            qkv = self._project(layer, x, rotations, index, where)
            if index == last and self._chosen is None:
                return  # the last layer's output feeds logits only
            attended = torch.cat([self._attend_part(qkv, index, part) for part in parts])
            self._finish_layer(layer, x, attended)

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Feed token `ids[i]` at `positions[i]` of row i; returns the next token's logits, float32 [len(ids), vocabulary]."""
        at = torch.tensor(positions)
        count = len(ids)
        rotations, where = self._rotations[at][:, None], self._cache_index(torch.arange(count), at)
        mask = torch.zeros(count, 1, self.capacity).masked_fill_(torch.arange(self.capacity) > at[:, None, None], -torch.inf)
        mask = mask.expand(count, self._kv_heads * self._group, self.capacity).reshape(-1, self._group, self.capacity).to(self.dtype)
        x = F.embedding(torch.tensor(ids), self.weights.embedding).float()
        for index, layer in enumerate(self.weights.layers):
            qkv = self._project(layer, x, rotations, index, where)
            self._finish_layer(layer, x, self._attend_rows(qkv, index, mask))
        return linear(self._norm(x, self.weights.norm), self.weights.head).float()

    def take_routing(self) -> list[bytes]:
        """Of each token fed since the last call its experts in all layers, int32 [layers, experts per token], 0 in those without; nothing
        unless it `tells_routing`."""
        mixture, chosen = self.architecture.mixture, self._chosen
        if not chosen or mixture is None:
            return []
        self._chosen, routed = [], self.architecture.num_layers - mixture.num_dense
        passes = [torch.stack(chosen[first : first + routed], 1) for first in range(0, len(chosen), routed)]
        return [token.tobytes() for token in F.pad(torch.cat(passes).int(), (0, 0, mixture.num_dense, 0)).numpy()]

    def _allocate(self, capacity: int) -> None:
        kept = min(capacity, self.capacity)
        shape = (self._planes, self.num_rows + 1, self._kv_heads, capacity, self._size)
        self.kv += [torch.zeros(0)] * (self.architecture.num_layers - len(self.kv))
        for index, old in enumerate(self.kv):
            # Zeros, not garbage: a masked position's weight is 0, and 0 * NaN would be NaN.
            self.kv[index] = torch.zeros(shape, dtype=self.dtype)
            if kept:
                self.kv[index][:, :, :, :kept] = old[:, :, :, :kept]
        self.capacity = capacity

    def _cache_index(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Flat indices of (token, key or value, head) into a layer's cache seen as [-1, head_dim]; int64 [tokens * planes * kv_heads]."""
        planes = torch.arange(self._planes)[:, None] * (self.num_rows + 1)
        index = ((rows[:, None, None] + planes) * self._kv_heads + torch.arange(self._kv_heads)) * self.capacity
        return (index + positions[:, None, None]).reshape(-1)

    def _project(self, layer: Layer, x: torch.Tensor, rotations: torch.Tensor, index: int, where: torch.Tensor) -> torch.Tensor:
        """Queries, keys (rotated) and values of `x`, [tokens, heads + planes * kv_heads, head_dim]; keys and values go to the cache."""
        normed = self._norm(x, layer.input_norm)
        qkv = self._latent(normed, layer.qkv) if isinstance(layer.qkv, LatentQK) else linear(normed, layer.qkv)
        qkv = qkv.view(-1, self._heads + self._planes * self._kv_heads, self._size)
        qk = qkv[:, : self._heads + self._kv_heads].float()  # the same memory if dtype is float32
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (self._size,), None, self.architecture.rms_norm_eps).mul_(layer.qk_norm)
        torch.view_as_complex(qk[..., : self.architecture.rotary_dim].unflatten(-1, (-1, 2))).mul_(rotations)
        if self.dtype != torch.float32 or layer.qk_norm is not None:
            qkv[:, : self._heads + self._kv_heads] = qk
        kv = qkv[:, self._heads:].reshape(-1, self._size)
        self.kv[index].view(-1, self._size).index_copy_(0, where, kv)
        return qkv

    def _latent(self, normed: torch.Tensor, qk: LatentQK) -> torch.Tensor:
        """Queries and key of `normed` [tokens, hidden], before they are rotated, [tokens, (heads + 1) * head_dim]."""
        latent = self.architecture.latent
        assert latent is not None
        query, rope, key = linear(normed, qk.down).split([latent.query_rank, latent.rope_dim, latent.kv_rank], -1)
        query = normed if qk.query_norm is None else self._norm(query.float(), qk.query_norm, NORM_EPS)
        return torch.cat([linear(query, qk.query), rope, self._norm(key.float(), qk.key_norm, NORM_EPS)], -1)

    def _attend_rows(self, qkv: torch.Tensor, index: int, mask: torch.Tensor) -> torch.Tensor:
        """Attention of one query per row [0, tokens) over the row's whole capacity; [tokens, heads * head_dim]."""
        count = qkv.shape[0]
        keys, values = (self.kv[index][plane, :count].view(-1, self.capacity, self._size) for plane in (0, -1))
        query = qkv[:, : self._heads].reshape(-1, self._group, self._size)
        scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(torch.softmax(scores, -1), values).view(count, -1)

    def _part(self, segment: Segment, first: int) -> PrefillPart:
        count, end = len(segment.tokens), segment.start + len(segment.tokens)
        hidden = torch.arange(end) > torch.arange(segment.start, end)[:, None]
        mask = torch.zeros(count, end, dtype=self.dtype).masked_fill_(hidden, -torch.inf).repeat(self._group, 1)
        return PrefillPart(first, first + count, segment.row, end, mask)

    def _attend_part(self, qkv: torch.Tensor, index: int, part: PrefillPart) -> torch.Tensor:
        """Causal attention of one prefill segment; [tokens, heads * head_dim]. The query heads of a KV head stand below each other."""
        count = part.last - part.first
        query = qkv[part.first : part.last, : self._heads].unflatten(1, (self._kv_heads, self._group))
        query = query.permute(1, 2, 0, 3).reshape(1, self._kv_heads, self._group * count, self._size)
        keys, values = (self.kv[index][plane, part.row, None, :, : part.end] for plane in (0, -1))
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=part.mask, scale=self._scale)
        return attended.view(self._heads, count, self._size).transpose(0, 1).reshape(count, -1)

    def _finish_layer(self, layer: Layer, x: torch.Tensor, attended: torch.Tensor) -> None:
        """Add the attention's and the MLP's outputs to `x`, in place."""
        x.add_(linear(attended, layer.output))
        normed = self._norm(x, layer.mlp_norm)
        if isinstance(layer.mlp, MLP):
            x.add_(_gated(normed, layer.mlp))
        else:
            self._add_experts(x, normed, layer.mlp)

    def _add_experts(self, x: torch.Tensor, normed: torch.Tensor, experts: Experts) -> None:
        """Add to each token of `x` the outputs of its most probable experts, weighted by their probabilities, and of the one for all tokens."""
        if experts.shared is not None:
            x.add_(_gated(normed, experts.shared))
        weights, chosen = self._route(linear(normed, experts.router).float(), experts.bias)
        if self._chosen is not None:
            self._chosen.append(chosen)
        for index in chosen.unique().tolist():
            tokens, place = torch.where(chosen == index)
            x.index_add_(0, tokens, _gated(normed[tokens], experts.mlps[index]) * weights[tokens, place, None])

    def _route(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights and numbers of each token's experts, [tokens, experts per token] each, for `logits` [tokens, experts]."""
        mixture = self.architecture.mixture
        assert mixture is not None
        scores = logits.sigmoid() if mixture.sigmoid else logits.softmax(-1)
        order = scores if bias is None else scores + bias
        if mixture.limited:
            groups = order.unflatten(-1, (mixture.num_groups, -1))
            best = groups.topk(2, -1).values.sum(-1).topk(mixture.groups_per_token, -1).indices
            others = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
            order = groups.masked_fill(others[..., None], -torch.inf).flatten(1)
        chosen = order.topk(mixture.experts_per_token, -1).indices
        weights = scores.gather(1, chosen)
        return mixture.scale * (weights / weights.sum(-1, keepdim=True) if mixture.normalized else weights), chosen

    def _norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps or self.architecture.rms_norm_eps).to(self.dtype)


def _gated(x: torch.Tensor, mlp: MLP) -> torch.Tensor:
    gate, up = linear(x, mlp.gate_up).chunk(2, -1)
    return linear(F.silu(gate).mul_(up), mlp.down)

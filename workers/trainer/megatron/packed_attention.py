"""Attention over a packed micro-batch whose responses share their prompts, as Megatron-core's core attention.

The layout (workers/trainer/layout.py) has trunks, which attend to themselves causally, and branches, which attend to
the tokens before them in their response and, causally, to themselves. Segments of similar size are padded to one shape
and attended to in one call:

    trunks     queries [B, S]       keys [B, S]          causal, so padding at the end is never seen
    branches   queries [B, L]       keys [B, C + L]      mask: the context's real tokens, then causal

Padding exists inside this module only. Indices, masks and rotary angles depend on the layout alone: they are made once
per micro-batch (`plan_attention`) and travel to all layers in Megatron's `packed_seq_params`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from workers.trainer.layout import Branch, PackedBatch


@dataclass(frozen=True)
class SegmentBucket:
    """Segments of similar length: `query_index` int64 [B, Q] and `key_index` int64 [B, K] into the packed tokens.

    `mask` is additive float32 [B, 1, Q, K], or None for plain causal attention (then Q = K). `real` int64 lists the
    flat positions in [B, Q] that are no padding.
    """

    query_index: Tensor
    key_index: Tensor
    mask: Tensor | None
    real: Tensor


@dataclass
class PackedLayoutParams(PackedSeqParams):
    """What the attention and the output need to know about one micro-batch; passes through Megatron unread.

    `cos`, `sin` float32 [T, 1, head_dim]; `order` int64 [T] takes the buckets' real outputs, one after the other, back
    to the packed order.
    """

    batch: PackedBatch | None = None
    buckets: list[SegmentBucket] = field(default_factory=list)
    order: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None


def plan_attention(batch: PackedBatch, inverse_frequencies: Tensor, device: torch.device) -> PackedLayoutParams:
    """Indices, masks and rotary angles of one micro-batch, on `device`."""
    nothing = np.empty(0, np.int64)
    buckets = [_trunk_bucket(part) for part in _similar([Branch(start, length, nothing) for start, length in batch.trunks])]
    buckets += [_branch_bucket(part) for part in _similar(batch.branches)]
    produced = torch.cat([bucket.query_index.reshape(-1)[bucket.real] for bucket in buckets])
    angles = batch.position_ids.float()[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    total = torch.tensor([0, len(batch.tokens)], dtype=torch.int32)
    return PackedLayoutParams(
        qkv_format="thd",
        cu_seqlens_q=total,
        cu_seqlens_kv=total,
        batch=batch,
        buckets=[_to(bucket, device) for bucket in buckets],
        order=torch.argsort(produced).to(device),
        cos=angles.cos().to(device),
        sin=angles.sin().to(device),
    )


def _similar(segments: list[Branch]) -> list[list[Branch]]:
    """Lists within which padding to the longest at most doubles a segment's length and context (or adds 16 tokens)."""
    lists: dict[tuple[int, int], list[Branch]] = {}
    for segment in segments:
        size = ((segment.length + 15).bit_length(), (len(segment.context) + 15).bit_length())
        lists.setdefault(size, []).append(segment)
    return list(lists.values())


def _padded(rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Rows as int64 [B, longest], filled up with 0; and bool [B, longest], True where there is no padding."""
    lengths = np.array([len(row) for row in rows])
    inside = np.arange(lengths.max()) < lengths[:, None]
    padded = np.zeros(inside.shape, np.int64)
    padded[inside] = np.concatenate(rows)
    return torch.from_numpy(padded), torch.from_numpy(inside)


def _own_tokens(segments: list[Branch]) -> tuple[Tensor, Tensor]:
    return _padded([np.arange(segment.start, segment.start + segment.length) for segment in segments])


def _trunk_bucket(segments: list[Branch]) -> SegmentBucket:
    index, inside = _own_tokens(segments)
    return SegmentBucket(index, index, None, inside.reshape(-1).nonzero()[:, 0])


def _branch_bucket(segments: list[Branch]) -> SegmentBucket:
    query_index, inside = _own_tokens(segments)
    context_index, in_context = _padded([segment.context for segment in segments])
    width = query_index.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    visible = torch.cat([in_context[:, None].expand(-1, width, -1), causal.expand(len(segments), -1, -1)], dim=-1)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None]
    return SegmentBucket(query_index, torch.cat([context_index, query_index], dim=1), mask, inside.reshape(-1).nonzero()[:, 0])


def _to(bucket: SegmentBucket, device: torch.device) -> SegmentBucket:
    mask = None if bucket.mask is None else bucket.mask.to(device)
    return SegmentBucket(bucket.query_index.to(device), bucket.key_index.to(device), mask, bucket.real.to(device))


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [T, heads, head_dim], halves rotated against each other (Hugging Face's order)."""
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat((-second, first), dim=-1) * sin


class PackedAttention(torch.nn.Module):
    """Megatron-core's core attention for packed trunks and branches, with rotary embedding and grouped queries.

    Rotary embedding is applied here, as its positions are those of the layout: they go on from the trunk in every
    branch, which Megatron's own packed rotary embedding cannot say.
    """

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
                packed_seq_params: PackedLayoutParams, **kwargs: Any) -> Tensor:
        """`query` [T, heads, d], `key` and `value` [T, kv_heads, d]; returns [T, heads * d] in the dtype of `query`."""
        plan = packed_seq_params
        assert plan.cos is not None and plan.sin is not None and plan.order is not None
        dtype = query.dtype
        cos, sin = plan.cos.to(dtype), plan.sin.to(dtype)
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        if dtype is torch.bfloat16 and query.device.type == "cpu":
            # The CPU kernel is several times slower in bfloat16 than in float32 at the lengths met here.
            query, key, value = query.float(), key.float(), value.float()
        outputs = [self._attend(bucket, query, key, value) for bucket in plan.buckets]
        return torch.cat(outputs).index_select(0, plan.order).to(dtype)

    def _attend(self, bucket: SegmentBucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The bucket's real outputs, [number of real queries, heads * d]."""
        queries = _take(query, bucket.query_index)
        mask = None if bucket.mask is None else bucket.mask.to(query.dtype)
        output = functional.scaled_dot_product_attention(
            queries, _take(key, bucket.key_index), _take(value, bucket.key_index),
            attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
        output = output.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[2])
        return output if len(bucket.real) == len(output) else output.index_select(0, bucket.real)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Rows [B, S] of [T, heads, d], as [B, heads, S, d]."""
    return values.index_select(0, index.reshape(-1)).view(*index.shape, *values.shape[1:]).transpose(1, 2)

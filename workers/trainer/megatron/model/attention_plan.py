"""Where the keys of every query of a micro-batch lie, worked out once and used by all layers.

The layout (workers/trainer/batch/sequence_layout.py) has trunks, which attend to themselves causally, and branches, which attend to the tokens before
them in their response and, causally, to themselves. There are two ways to compute that:

    buckets     segments of similar size, padded to one shape and attended to in one call      CPU; any dtype
                  trunks     queries [B, S]       keys [B, S]          causal, so padding at the end is never seen
                  branches   queries [B, L]       keys [B, C + L]      mask: the context's real tokens, then causal
    lengths     all segments one after the other, for a kernel that takes lengths              CUDA, bfloat16
                  a causal mask that is aligned at the end lets a branch see its whole context

Padding exists in buckets only, and nowhere outside the attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from workers.trainer.batch.context_parallel import RankPart
from workers.trainer.batch.sequence_layout import Branch, PackedBatch
from workers.trainer.megatron.parallel.cpu_backend import upload


@dataclass(frozen=True)
class SegmentBucket:
    """Segments of similar length: `query_index` int64 [B, Q] into this rank's tokens, `key_index` int64 [B, K] into all packed tokens.

    `mask` is additive float32 [B, 1, Q, K], or None for plain causal attention (then Q = K). `real` int64 lists the
    flat positions in [B, Q] that are no padding.
    """

    query_index: Tensor
    key_index: Tensor
    mask: Tensor | None
    real: Tensor


@dataclass(frozen=True)
class SegmentLengths:
    """S segments: queries are this rank's tokens at `query_index` int64 [q], keys all packed tokens at `key_index` int64 [k], one segment
    after the other (None: they stand so already); `query_ends` and `key_ends` int32 [S + 1] say where each begins and ends."""

    query_index: Tensor | None
    key_index: Tensor | None
    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int


@dataclass
class PackedLayoutParams(PackedSeqParams):
    """What the attention and the output need to know about one micro-batch; passes through Megatron unread.

    `batch` is all of it, `part` what this rank has; `cos`, `sin` [t, 1, rotary_dim] of its tokens, in the model's dtype; `order` int64 [t] takes
    the outputs, segment after segment, back to the order of its tokens (None: they are in it); `key_order` int64 [T] takes the ranks' keys, one
    rank's after the other, to the packed order (None: there is one rank). One of `buckets` and `lengths` is given. `routing`: of its tokens
    on this rank, for router_replay.py.
    """

    batch: PackedBatch | None = None
    part: RankPart | None = None
    buckets: list[SegmentBucket] = field(default_factory=list)
    lengths: SegmentLengths | None = None
    order: Tensor | None = None
    key_order: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    routing: Tensor | None = None


def plan_attention(batch: PackedBatch, part: RankPart, inverse_frequencies: Tensor, device: torch.device, dtype: torch.dtype,
                   parts: list[RankPart] | None = None, by_lengths: bool = False) -> PackedLayoutParams:
    """Indices, masks and rotary angles, in `dtype`, of one micro-batch, on `device`. `parts` are those of all ranks, where there are several."""
    angles = part.position_ids.float()[:, None] * inverse_frequencies
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    total = torch.tensor([0, len(batch.tokens)], dtype=torch.int32)
    plan = PackedLayoutParams(
        qkv_format="thd", cu_seqlens_q=total, cu_seqlens_kv=total, batch=batch, part=part,
        cos=upload(angles.cos().to(dtype), device), sin=upload(angles.sin().to(dtype), device))
    if parts is not None:
        plan.key_order = upload(torch.argsort(torch.from_numpy(np.concatenate([each.rows for each in parts]))), device)
    local = np.full(len(batch.tokens), -1)
    local[part.rows] = np.arange(len(part.rows))
    if by_lengths:
        plan.lengths, produced = _lengths(part, local, device)
    else:
        buckets = _buckets(part, local)
        plan.buckets = [_to(bucket, device) for bucket in buckets]
        produced = torch.cat([bucket.query_index.reshape(-1)[bucket.real] for bucket in buckets])
    plan.order = _unless_in_order(torch.argsort(produced), len(part.rows), device)
    return plan


def _unless_in_order(index: Tensor, number: int, device: torch.device) -> Tensor | None:
    """`index`, on `device`, unless it takes all of `number` rows as they stand: copying them would only take memory and time."""
    return None if torch.equal(index, torch.arange(number)) else upload(index, device)


def _segments(part: RankPart) -> list[Branch]:
    nothing = np.empty(0, np.int64)
    return [Branch(start, length, nothing) for start, length in part.trunks]


def _lengths(part: RankPart, local: np.ndarray, device: torch.device) -> tuple[SegmentLengths, Tensor]:
    """The segments, and the rows of this rank's tokens int64 [q] in their order."""
    segments = _segments(part) + part.branches
    own = [np.arange(segment.start, segment.start + segment.length) for segment in segments]
    keys = [np.concatenate([segment.context, tokens]) for segment, tokens in zip(segments, own, strict=True)]

    def ends(rows: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.cumsum([0, *(len(row) for row in rows)]).astype(np.int32))

    queries, all_keys = torch.from_numpy(local[np.concatenate(own)]), torch.from_numpy(np.concatenate(keys))
    return SegmentLengths(_unless_in_order(queries, len(part.rows), device), _unless_in_order(all_keys, len(local), device),
                          upload(ends(own), device), upload(ends(keys), device), max(map(len, own)), max(map(len, keys))), queries


def _buckets(part: RankPart, local: np.ndarray) -> list[SegmentBucket]:
    return [*(_trunk_bucket(some, local) for some in _similar(_segments(part))), *(_branch_bucket(some, local) for some in _similar(part.branches))]


def _similar(segments: list[Branch]) -> list[list[Branch]]:
    """Lists within which padding to the longest at most doubles a segment's length and context (or adds 16 tokens)."""
    lists: dict[tuple[int, int], list[Branch]] = {}
    for segment in segments:
        size = ((segment.length + 15).bit_length(), (len(segment.context) + 15).bit_length())
        lists.setdefault(size, []).append(segment)
    return list(lists.values())


def _padded(rows: list[np.ndarray]) -> tuple[np.ndarray, Tensor]:
    """Rows as int64 [B, longest], filled up with each row's beginning (0: empty ones); and bool [B, longest], True where there is no padding."""
    lengths = np.array([len(row) for row in rows])
    inside = np.arange(lengths.max()) < lengths[:, None]
    padded = np.repeat(np.array([row[0] if len(row) else 0 for row in rows], np.int64)[:, None], lengths.max(), axis=1)
    padded[inside] = np.concatenate(rows)
    return padded, torch.from_numpy(inside)


def _own_tokens(segments: list[Branch]) -> tuple[np.ndarray, Tensor]:
    return _padded([np.arange(segment.start, segment.start + segment.length) for segment in segments])


def _trunk_bucket(segments: list[Branch], local: np.ndarray) -> SegmentBucket:
    index, inside = _own_tokens(segments)
    return SegmentBucket(torch.from_numpy(local[index]), torch.from_numpy(index), None, inside.reshape(-1).nonzero()[:, 0])


def _branch_bucket(segments: list[Branch], local: np.ndarray) -> SegmentBucket:
    query_index, inside = _own_tokens(segments)
    context_index, in_context = _padded([segment.context for segment in segments])
    width = query_index.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    visible = torch.cat([in_context[:, None].expand(-1, width, -1), causal.expand(len(segments), -1, -1)], dim=-1)
    mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[:, None]
    keys = torch.from_numpy(np.concatenate([context_index, query_index], axis=1))
    return SegmentBucket(torch.from_numpy(local[query_index]), keys, mask, inside.reshape(-1).nonzero()[:, 0])


def _to(bucket: SegmentBucket, device: torch.device) -> SegmentBucket:
    mask = None if bucket.mask is None else upload(bucket.mask, device)
    return SegmentBucket(upload(bucket.query_index, device), upload(bucket.key_index, device), mask, upload(bucket.real, device))

"""How a micro-batch is divided among the ranks of a context-parallel group, and that its attention is the plain one whatever the division."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import make_groups
from workers.trainer.batch.context_parallel import RankPart, part_of
from workers.trainer.batch.sequence_layout import PackedBatch, pack_chunks, split_groups
from workers.trainer.megatron.model.attention_plan import PackedLayoutParams, plan_attention
from workers.trainer.megatron.model.packed_attention import PackedAttention, attend_by_lengths

HEADS, KV_HEADS, SIZE = 4, 2, 8
FREQUENCIES = 1.0 / 100.0 ** (torch.arange(0, SIZE, 2) / SIZE)


class Setup:
    """What the attention reads of Megatron's configuration."""

    kv_channels = SIZE
    multi_latent_attention = False


def batches(num_groups: int, multiple: int, share: bool, min_microbatches: int = 1) -> list[PackedBatch]:
    groups = make_groups(num_groups, seed=num_groups)
    return pack_chunks(groups, split_groups(groups, list(range(num_groups)), 60, share), 60, min_microbatches, multiple)


def seen_by_every_token(batch: PackedBatch) -> list[list[int]]:
    """For every token of the batch, those it attends to, itself included."""
    seen: list[list[int]] = [[] for _ in range(len(batch.tokens))]
    for start, length in batch.trunks:
        for token in range(start, start + length):
            seen[token] = list(range(start, token + 1))
    for branch in batch.branches:
        for token in range(branch.start, branch.start + branch.length):
            seen[token] = [*branch.context.tolist(), *range(branch.start, token + 1)]
    return seen


def plain_attention(batch: PackedBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Token by token, from the definition."""
    angles = torch.cat([batch.position_ids[:, None] * FREQUENCIES] * 2, dim=-1)[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * angles.cos() + torch.cat([-x[..., SIZE // 2:], x[..., :SIZE // 2]], dim=-1) * angles.sin()

    query, key = rotated(query), rotated(key).repeat_interleave(HEADS // KV_HEADS, dim=1)
    value = value.repeat_interleave(HEADS // KV_HEADS, dim=1)
    rows = []
    for token, seen in enumerate(seen_by_every_token(batch)):
        scores = torch.einsum("hd,khd->hk", query[token], key[seen]) / SIZE**0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[seen]).flatten())
    return torch.stack(rows)


def kernel_by_lengths(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor,
                      longest_query: int, longest_key: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool) -> torch.Tensor:
    """What flash attention does with lengths: causal, aligned at the end of the keys."""
    assert window_size == (-1, 0) and enable_gqa and query_ends.dtype == key_ends.dtype == torch.int32
    assert longest_query == int(query_ends.diff().max()) and longest_key == int(key_ends.diff().max())
    outputs = []
    for number in range(len(query_ends) - 1):
        q, k, v = (x[ends[number]:ends[number + 1]].transpose(0, 1) for x, ends in ((query, query_ends), (key, key_ends), (value, key_ends)))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True).transpose(0, 1))
    return torch.cat(outputs)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(1, 9))
def test_ranks_divide_tokens_and_predictions(num_groups: int, size: int, share: bool, at_least: int) -> None:
    for batch in batches(num_groups, 2 * size, share, at_least):
        parts = [part_of(batch, rank, size) for rank in range(size)]
        assert sorted(np.concatenate([part.rows for part in parts])) == list(range(len(batch.tokens)))
        assert len({len(part.rows) for part in parts}) == 1
        assert sorted(torch.cat([part.selected for part in parts]).tolist()) == list(range(len(batch.targets)))
        for part in parts:
            assert torch.equal(part.tokens, batch.tokens[part.rows]) and torch.equal(part.position_ids, batch.position_ids[part.rows])
            assert torch.equal(part.targets, batch.targets[part.selected])
            rows = torch.from_numpy(part.rows)[part.predict_at]
            assert torch.equal(rows[part.predict_index], batch.predict_at[batch.predict_index[part.selected]])
            assert part.predict_at.tolist() == sorted(set(part.predict_at.tolist()))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.booleans(), st.booleans())
def test_attention_is_the_plain_one(num_groups: int, size: int, share: bool, by_lengths: bool) -> None:
    torch.manual_seed(num_groups)
    for batch in batches(num_groups, 2 * size, share):
        total = len(batch.tokens)
        query, key, value = (torch.randn(total, heads, SIZE, dtype=torch.float64) for heads in (HEADS, KV_HEADS, KV_HEADS))
        expected = plain_attention(batch, query, key, value)
        parts = [part_of(batch, rank, size) for rank in range(size)]
        for part in parts:
            output = attention_of(batch, part, query, key, value, by_lengths)
            assert torch.allclose(output, expected[part.rows], atol=1e-6), "angles are float32"


def attention_of(batch: PackedBatch, part: RankPart, query: Any, key: Any, value: Any, by_lengths: bool) -> torch.Tensor:
    """A rank's outputs, with everybody's keys as the exchange would bring them."""
    everything = part_of(batch)
    whole = plan_attention(batch, everything, FREQUENCIES, torch.device("cpu"), torch.float32)
    own: PackedLayoutParams = plan_attention(batch, part, FREQUENCIES, torch.device("cpu"), torch.float32, by_lengths=by_lengths)
    assert whole.cos is not None and whole.sin is not None
    rotated = [x * whole.cos + torch.cat([-x[..., SIZE // 2:], x[..., :SIZE // 2]], dim=-1) * whole.sin for x in (query, key)]
    attention = PackedAttention(Setup(), 1)
    if own.lengths is not None:
        output = attend_by_lengths(own.lengths, rotated[0][part.rows], rotated[1], value, attention.scale, kernel_by_lengths)
    else:
        output = torch.cat([attention._attend(bucket, rotated[0][part.rows], rotated[1], value) for bucket in own.buckets])
    return output if own.order is None else output.index_select(0, own.order)


def test_the_kernel_takes_what_it_is_given() -> None:
    inspect.signature(varlen.varlen_attn).bind(*range(7), scale=1.0, window_size=(-1, 0), enable_gqa=True)


def test_copies_without_enough_samples_get_micro_batches_that_predict_nothing() -> None:
    groups = make_groups(1)
    packed = pack_chunks(groups, split_groups(groups, [0], 400, True), 400, min_microbatches=3, multiple=4)
    assert [len(batch.samples) for batch in packed] == [5, 0, 0] and [len(batch.tokens) for batch in packed][1:] == [4, 4]
    assert [batch.num_real for batch in packed][1:] == [0, 0]

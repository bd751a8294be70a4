"""Attention over a packed micro-batch whose responses share their prompts, as Megatron-core's core attention.

    query, key (rotated), value of this rank's tokens --> keys and values of all ranks of the context-parallel group
        --> segment by segment, as attention_plan.py has worked out --> outputs of this rank's tokens

Heads are those of this tensor-parallel rank. Keys and values are exchanged in one all-gather a layer; its gradient is the
sum over the ranks.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from megatron.core import parallel_state
from torch import Tensor

from workers.trainer.megatron.model.attention_plan import PackedLayoutParams, SegmentBucket, SegmentLengths
from workers.trainer.megatron.model.compiled import compiled

HOPPER = 9
"""Major compute capability."""


def rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [T, heads, head_dim], halves rotated against each other (Hugging Face's order); what `cos` is too short for
    stays."""
    turned, rest = values.split([cos.shape[-1], values.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotated`; on GPUs one kernel in each direction instead of five."""
    return compiled(rotated)(values, cos, sin) if values.is_cuda else rotated(values, cos, sin)


def choose_flash_attention() -> str:
    """Have torch's variable-length attention run FlashAttention 3 on Hopper, where it is installed (arXiv 2407.08608), which is up to twice as fast
    there; returns its name, '' where it is torch's own. Not run on GPUs yet (docs/gpu.md)."""
    from torch.nn import attention

    if torch.cuda.get_device_capability()[0] != HOPPER or importlib.util.find_spec("flash_attn_interface") is None:
        return ""
    if attention.current_flash_attention_impl() != "FA3":
        try:
            attention.activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            print(f"FlashAttention 3 is installed and cannot be used ({error}): torch's own is", flush=True)
            return ""
    return "FA3"


class PackedAttention(torch.nn.Module):
    """Megatron-core's core attention for packed trunks and branches, with grouped queries, of what self_attention.py or mla.py has rotated."""

    def __init__(self, config: Any, layer_number: int, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
                packed_seq_params: PackedLayoutParams, **kwargs: Any) -> Tensor:
        """`query` [t, heads, d], `key` [t, kv_heads, d], `value` [t, kv_heads, e], e <= d; returns [t, heads * e] in the dtype of `query`."""
        width = value.shape[-1]
        # The kernels that keep no scores take one size. A view of query, key and value would keep all of them for the backward pass.
        value = functional.pad(value, (0, key.shape[-1] - width)) if width < key.shape[-1] else value.contiguous()
        output = self._attended(packed_seq_params, query, key, value)
        return output if width == key.shape[-1] else output.unflatten(-1, (query.shape[1], -1))[..., :width].flatten(-2)

    def _attended(self, plan: PackedLayoutParams, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        dtype = query.dtype
        if plan.key_order is not None:
            key, value = _GatherKeys.apply(torch.cat([key, value], dim=1), plan.key_order).chunk(2, dim=1)
        if plan.lengths is not None:
            return _rows(attend_by_lengths(plan.lengths, query, key, value, self.scale), plan.order)
        if dtype is torch.bfloat16 and query.device.type == "cpu":
            # The CPU kernel is several times slower in bfloat16 than in float32 at the lengths met here.
            query, key, value = query.float(), key.float(), value.float()
        outputs = [self._attend(bucket, query, key, value) for bucket in plan.buckets]
        return _rows(torch.cat(outputs), plan.order).to(dtype)

    def _attend(self, bucket: SegmentBucket, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The bucket's real outputs, [number of real queries, heads * d]."""
        queries, keys, values = _take(query, bucket.query_index), _take(key, bucket.key_index), _take(value, bucket.key_index)
        if query.device.type != "cpu":  # with grouped queries, only the kernel that keeps all scores takes float32
            keys, values = (each.repeat_interleave(queries.shape[1] // each.shape[1], dim=1) for each in (keys, values))
        mask = None if bucket.mask is None else bucket.mask.to(query.dtype)
        output = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
        output = output.transpose(1, 2).reshape(-1, query.shape[1] * query.shape[2])
        return output if len(bucket.real) == len(output) else output.index_select(0, bucket.real)


def attend_by_lengths(lengths: SegmentLengths, query: Tensor, key: Tensor, value: Tensor, scale: float, kernel: Any = None) -> Tensor:
    """All segments in one call of torch's variable-length flash attention (torch.nn.attention.varlen), [q, heads * d].

    Its causal mask (window (-1, 0)) is aligned at the end of the keys. `kernel` has the interface of `varlen_attn`.
    """
    if kernel is None:
        from torch.nn.attention.varlen import varlen_attn as kernel
    output = kernel(
        _rows(query, lengths.query_index), _rows(key, lengths.key_index), _rows(value, lengths.key_index),
        lengths.query_ends, lengths.key_ends, lengths.longest_query, lengths.longest_key, scale=scale, window_size=(-1, 0), enable_gqa=True)
    return output.reshape(len(output), -1)


def _rows(values: Tensor, index: Tensor | None) -> Tensor:
    """Rows of `values` at `index`; None: as they stand."""
    return values if index is None else values.index_select(0, index)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """Rows [B, S] of [T, heads, d], as [B, heads, S, d]."""
    return values.index_select(0, index.reshape(-1)).view(*index.shape, *values.shape[1:]).transpose(1, 2)


class _GatherKeys(torch.autograd.Function):
    """Keys and values [t, ...] of all ranks of the context-parallel group, [T, ...] in packed order."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, order: Tensor) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group=group)
        ctx.save_for_backward(order)
        return torch.cat(parts).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (order,) = ctx.saved_tensors
        group = parallel_state.get_context_parallel_group()
        by_rank = torch.empty_like(grad)
        by_rank[order] = grad
        if grad.device.type != "cpu":
            own = torch.empty_like(by_rank[:len(by_rank) // group.size()])
            dist.reduce_scatter_tensor(own, by_rank, group=group)
            return own, None
        dist.all_reduce(by_rank, group=group)  # gloo has no reduce-scatter
        return by_rank.chunk(group.size())[group.rank()], None

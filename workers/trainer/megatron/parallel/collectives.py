"""What the ranks of a gang tell each other: bytes, texts, flags and small arrays, on the host, through gloo (groups: process_group.py)."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.trainer.megatron.parallel.process_group import copy_group, copy_index, leader_of_copy, num_copies, rank, world_size


def broadcast_bytes(payload: bytes | None, source: int = 0) -> bytes:
    """`payload` of rank `source` (elsewhere it is not looked at), on all ranks. All ranks call this together."""
    return _broadcast(payload, source, None) if world_size() > 1 else _given(payload)


def broadcast_in_copy(payload: bytes | None) -> bytes:
    """`payload` of the copy's leader (elsewhere it is not looked at), on all ranks of the copy, which call this together."""
    return _broadcast(payload, leader_of_copy(), copy_group()) if copy_group() is not None else _given(payload)


def _given(payload: bytes | None) -> bytes:
    assert payload is not None
    return payload


def _broadcast(payload: bytes | None, source: int, group: dist.ProcessGroup | None) -> bytes:
    content = torch.empty(0, dtype=torch.uint8)
    if rank() == source:
        content = torch.frombuffer(bytearray(_given(payload)), dtype=torch.uint8) if payload else content
    length = torch.tensor([len(content)])
    dist.broadcast(length, source, group)
    if rank() != source:
        content = torch.empty(int(length), dtype=torch.uint8)
    if len(content):
        dist.broadcast(content, source, group)
    return content.numpy().tobytes()


def first_text(text: str) -> str:
    """The text of the lowest rank that has one, on all ranks; '' where none has. All ranks call this together."""
    if world_size() == 1:
        return text
    lowest = torch.tensor([rank() if text else world_size()])
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    source = int(lowest)
    return broadcast_bytes(text.encode(), source).decode() if source < world_size() else ""


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank. All ranks call this together."""
    return bool(max_over_ranks(np.array([int(flag)]))[0])


def any_in_copy(flag: bool) -> bool:
    """Whether `flag` is set on any rank of the copy. All its ranks call this together."""
    return bool(_reduced(np.array([int(flag)]), dist.ReduceOp.MAX, copy_group())[0]) if copy_group() is not None else flag


def sum_over_ranks(values: np.ndarray) -> np.ndarray:
    """Sums over all ranks, element by element, in the array's dtype. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.SUM) if world_size() > 1 else values


def sum_in_copy(values: np.ndarray) -> np.ndarray:
    """Sums over the ranks of this copy, which call this together, element by element, in the array's dtype."""
    return _reduced(values, dist.ReduceOp.SUM, copy_group()) if copy_group() is not None else values


def sum_over_copies(values: np.ndarray) -> np.ndarray:
    """Sums over the copies of what is the same on all ranks of a copy. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.SUM, parallel_state.get_data_parallel_group_gloo()) if num_copies() > 1 else values


def gather_over_copies(values: np.ndarray) -> np.ndarray:
    """The values [n] of all copies, one copy's after the other's, of what is the same on all ranks of a copy. All ranks call this together."""
    own = copy_index()
    lengths = np.zeros(num_copies(), np.int64)
    lengths[own] = len(values)
    lengths = sum_over_copies(lengths)
    start, whole = int(lengths[:own].sum()), np.zeros(int(lengths.sum()), values.dtype)
    whole[start:start + len(values)] = values
    return sum_over_copies(whole)


def max_over_ranks(values: np.ndarray) -> np.ndarray:
    """Maxima over all ranks, element by element. All ranks call this together."""
    return _reduced(values, dist.ReduceOp.MAX) if world_size() > 1 else values


def _reduced(values: np.ndarray, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None) -> np.ndarray:
    if values.size == 0:
        return values
    tensor: Tensor = torch.from_numpy(values.copy())
    dist.all_reduce(tensor, operation, group)
    return tensor.numpy()

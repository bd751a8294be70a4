"""Tensors of a model as they come from a weight group: one broadcast each, or many in one flat run of bytes (SGLang's flattened_bucket)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from workers.rollout.engines.servers.embedded.api import FromDistributed, InitGroup, RequestError, require
from workers.weights.update_group import BroadcastGroup, GroupError

MAX_RANKS = 1 << 20
MAX_ITEMS = 1 << 36


def join(body: InitGroup, timeout_s: float) -> BroadcastGroup:
    """Become a member. Blocks until all others are there. Raises `RequestError`."""
    require(1 <= body.master_port < 65536, "master_port", body.master_port, "must be from 1 to 65535", "Give the port of rank 0's store")
    require(0 <= body.rank_offset < body.world_size <= MAX_RANKS, "rank_offset, world_size", (body.rank_offset, body.world_size),
            f"must be a rank of at most {MAX_RANKS}", "Count ranks from 0")
    require(0 < len(body.group_name) <= 200 and "\0" not in body.master_address, "group_name, master_address",
            (body.group_name, body.master_address), "must be a name of at most 200 characters, and an address", "Correct them")
    try:
        return BroadcastGroup(body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name, body.backend, timeout_s)
    except GroupError as error:
        raise RequestError(str(error)) from error


def receive(group: BroadcastGroup, body: FromDistributed) -> list[torch.Tensor]:
    """The named tensors, or slices of them, on the CPU. Blocks until rank 0 has sent them. Raises `RequestError`."""
    require(len(body.names) == len(body.dtypes) == len(body.shapes), "names, dtypes, shapes",
            (len(body.names), len(body.dtypes), len(body.shapes)), "must be equally many", "Send one of each for every tensor")
    for shape in body.shapes:
        require(all(size >= 0 for size in shape) and math.prod(shape) <= MAX_ITEMS, "shapes", shape, f"must be sizes of at most {MAX_ITEMS} items",
                "Send this model's weights")
    dtypes = [_dtype(name) for name in body.dtypes]
    flattened = body.load_format == "flattened_bucket"
    try:
        return (_flattened if flattened else _one_by_one)(group, dtypes, body.shapes)
    except GroupError as error:
        raise RequestError(f"Failed to receive weights: {error}. Destroy the group, and make a new one") from error


def _one_by_one(group: BroadcastGroup, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    tensors = [torch.empty(tuple(shape), dtype=dtype) for dtype, shape in zip(dtypes, shapes, strict=True)]
    group.broadcast(tensors)
    return tensors


def _flattened(group: BroadcastGroup, dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in zip(dtypes, shapes, strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.broadcast([flat])
    return [part.view(dtype).reshape(shape) for part, dtype, shape in zip(flat.split(sizes), dtypes, shapes, strict=True)]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    require(isinstance(dtype, torch.dtype), "dtypes", name, "must be the name of a torch dtype", "Send float32, bfloat16 or float16")
    assert isinstance(dtype, torch.dtype)
    return dtype

"""Tensors of a model as they come from a weight group: one broadcast each, or many in one flat run of bytes (SGLang's flattened_bucket)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.rollout.engines.servers.embedded.api import FromDistributed, InitGroup, RequestError, require
from workers.weights.update_group import BroadcastGroup, GroupError


def join(body: InitGroup, timeout_s: float) -> BroadcastGroup:
    """Become a member. Blocks until all others are there. Raises `RequestError`."""
    try:
        return BroadcastGroup(body.master_address, body.master_port, body.rank_offset, body.world_size, body.group_name, body.backend, timeout_s)
    except GroupError as error:
        raise RequestError(str(error)) from error


def receive(group: BroadcastGroup, body: FromDistributed) -> dict[str, torch.Tensor]:
    """The named tensors, on the CPU. Blocks until rank 0 has sent them. Raises `RequestError`."""
    require(len(body.names) == len(body.dtypes) == len(body.shapes), "names, dtypes, shapes",
            (len(body.names), len(body.dtypes), len(body.shapes)), "must be equally many", "Send one of each for every tensor")
    dtypes = [_dtype(name) for name in body.dtypes]
    flattened = body.load_format == "flattened_bucket"
    try:
        tensors = (_flattened if flattened else _one_by_one)(group, dtypes, body.shapes)
    except GroupError as error:
        raise RequestError(f"Failed to receive weights: {error}. Destroy the group, and make a new one") from error
    return dict(zip(body.names, tensors, strict=True))


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

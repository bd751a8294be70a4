"""The distributed optimizer's state as parts of whole tensors, so that any layout of ranks loads what any other has saved.

Megatron's distributed optimizer cuts its buffers into equal ranges, one for each data-parallel rank, wherever parameters begin and end:

    parameter [rows, columns]     this rank's tensor-parallel part of a weight
        |   elements start .. end of it, row by row, are this rank's
        v
    boxes                         the end of a row, whole rows, the beginning of a row
        |   at their place in the whole weight
        v
    ShardedTensor optimizer.state.{param, exp_avg, exp_avg_sq}.<weight>

Keys and shapes are those of Megatron's "fully_reshardable" format. Megatron has the first data-parallel rank gather and write
everything for it, or all ranks hold everything; here each rank writes what it has, and nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class Box(NamedTuple):
    """The part `offset` .. `offset` + `sizes` of a tensor, which is its elements `start` .. `start` + prod(sizes) row by row."""

    start: int
    offset: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    """Boxes that make up elements `start` .. `end` (row by row) of a tensor of `shape`, in order: at most 2 * dimensions - 1."""
    if start >= end:
        return []
    if len(shape) < 2:
        return [Box(start, (start,) * len(shape), (end - start,) * len(shape))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # whole rows
    if first > last:  # within one row
        return _in_row(shape, last, start, end)
    whole = [Box(first * row, (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))] if first < last else []
    return [*_in_row(shape, first - 1, start, first * row), *whole, *_in_row(shape, last, last * row, end)]


def _in_row(shape: tuple[int, ...], index: int, start: int, end: int) -> list[Box]:
    base = index * math.prod(shape[1:])
    return [Box(base + box.start, (index, *box.offset), (1, *box.sizes)) for box in boxes(shape[1:], start - base, end - base)]


def sharded_state(optimizer: Any, model: dict[str, Any], loading: bool) -> dict[str, list[ShardedTensor]]:
    """This rank's part of the state, by key; its tensors share memory with the optimizer's.

    `optimizer`: Megatron's, `model`: the model's sharded state dict. Moments that are not there yet, as they are made at the first
    update, are zeros; `loading` gives them to the optimizer.
    """
    places = {id(entry.data): entry for entry in nested_values(model) if isinstance(entry, (ShardedTensor, ShardedTensorFactory))}
    found: dict[str, list[ShardedTensor]] = {}
    for distributed in _distributed(optimizer):
        for parameter, start, main, adam in _owned(distributed):
            tensors = _moments(adam, main, loading)
            if main.dtype != parameter.dtype:  # else the model's own say the same
                tensors["param"] = main
            for whole, begin in _whole_tensors(places[id(parameter)]):
                for name, tensor in tensors.items():
                    shards = _shards(f"optimizer.state.{name}.{whole.key}", whole, begin, tensor.detach(), start)
                    found.setdefault(f"optimizer.state.{name}.{whole.key}", []).extend(shards)
    return found


def num_updates(optimizer: Any) -> int:
    """How many updates the optimizer has made: Adam's step."""
    adams = [adam for distributed in _distributed(optimizer) for adam in _adams(distributed)]
    by_group = [int(group.get("step", 0)) for adam in adams for group in adam.param_groups]
    by_parameter = [int(state.get("step", 0)) for adam in adams for state in adam.state.values()]
    return max(by_group + by_parameter, default=0)


def restored(optimizer: Any, number: int) -> None:
    """Have the optimizer go on after `number` updates from what was loaded into it. Without any it is as new: its moments are made at the
    first."""
    for distributed in _distributed(optimizer):
        for adam in _adams(distributed):
            _set_step(adam, number)
        for parameter, inner in getattr(distributed.optimizer, "param_to_inner_param", {}).items():
            if inner is not parameter and inner.dtype == parameter.dtype:  # a copy on the host of what was loaded into the model
                inner.data.copy_(parameter)


def _set_step(adam: torch.optim.Optimizer, number: int) -> None:
    if not number:
        adam.state.clear()
    for group in adam.param_groups:
        group.pop("step", None)
        if number and not isinstance(adam, torch.optim.Adam):
            group["step"] = number
    if isinstance(adam, torch.optim.Adam):  # torch's own, for what is kept on the host, counts by parameter
        for state in adam.state.values():
            state["step"] = torch.tensor(float(number))


def _distributed(optimizer: Any) -> list[Any]:
    """The distributed optimizers in Megatron's chain; a rank may hold none of the parameters that one of them is for."""
    return [entry for entry in optimizer.chained_optimizers if not entry.is_stub_optimizer]


def _adams(distributed: Any) -> list[torch.optim.Optimizer]:
    """The one that does the updates, or those among which Megatron's HybridDeviceOptimizer divides them (trainer.optimizer_offload)."""
    return getattr(distributed.optimizer, "sub_optimizers", None) or [distributed.optimizer]


def _owned(distributed: Any) -> Iterator[tuple[torch.nn.Parameter, int, Tensor, torch.optim.Optimizer]]:
    """(parameter, first element, float32 weights [n] from there, who updates them) of what this rank updates."""
    inner = getattr(distributed.optimizer, "param_to_inner_param", {})
    adam_of = {id(weights): adam for adam in _adams(distributed) for group in adam.param_groups for weights in group["params"]}
    for by_dtype in distributed.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, position = distributed.model_param_group_index_map[parameter]
                    main = distributed.optimizer.param_groups[group]["params"][position]
                    main = inner.get(main, main)
                    yield parameter, ranges["param"].start, main, adam_of[id(main)]


def _moments(adam: torch.optim.Optimizer, main: Tensor, keep: bool) -> dict[str, Tensor]:
    state = adam.state.get(main, {})
    if not state:
        state = {name: torch.zeros_like(main).detach() for name in MOMENTS}
        if keep:
            adam.state[main] = state
    return {name: state[name] for name in MOMENTS}


def _whole_tensors(place: ShardedTensor | ShardedTensorFactory) -> list[tuple[ShardedTensor, int]]:
    """The whole tensors that a parameter is part of, each with its own part's first element in the parameter: gate and up
    projections are one parameter."""
    if isinstance(place, ShardedTensor):
        return [(place, 0)]
    parts = [part for part in nested_values(place.build()) if isinstance(part, ShardedTensor)]
    assert all(part.data is not None and part.data.is_contiguous() for part in parts), f"{place.key}: its parts must be whole rows"
    return [(part, part.data.storage_offset() - place.data.storage_offset()) for part in parts]


def _shards(key: str, whole: ShardedTensor, begin: int, values: Tensor, start: int) -> Iterator[ShardedTensor]:
    """`values` [n], elements `start` .. of a parameter, where they lie in the rows of it that begin at `begin` and are `whole`'s part."""
    first, end = max(start, begin), min(start + values.numel(), begin + math.prod(whole.local_shape))
    for box in boxes(tuple(whole.local_shape), first - begin, end - begin):
        at = begin + box.start - start
        sizes = (1,) * whole.prepend_axis_num + box.sizes
        inside = (0,) * whole.prepend_axis_num + box.offset
        yield ShardedTensor(
            key,
            values[at:at + math.prod(box.sizes)].view(sizes),
            values.dtype,
            sizes,
            tuple(whole.global_shape),
            tuple(outer + inner for outer, inner in zip(whole.global_offset, inside, strict=True)),
            axis_fragmentations=None,
            # The data-parallel ranks hold different parts, all others are replicas as in the model.
            replica_id=(*whole.replica_id[:-1], 0),  # type: ignore[misc]
            allow_shape_mismatch=whole.allow_shape_mismatch,
        )

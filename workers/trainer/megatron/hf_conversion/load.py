"""Fills a rank's parameters from a Hugging Face folder, reading only the slices that it holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from workers.model.architecture import Architecture
from workers.model.tensors import check_tensors
from workers.trainer.megatron.hf_conversion.names import HFTensors, Split, share_of
from workers.trainer.megatron.hf_conversion.shards import join, own_parameters, shard_shape, sharing_group

Read = Callable[[str, tuple[slice, ...]], Tensor]


@torch.no_grad()
def load_hf(model: torch.nn.Module, folder: Path, architecture: Architecture) -> None:
    """Fill the parameters of this rank's `model` from the safetensors files in `folder`, one at a time, in the parameters' dtype.

    Rows of a padded vocabulary become zero. Nothing is said to other ranks. Raises ModelError where a tensor is missing or of the wrong
    shape, ValueError where the model holds a parameter that `architecture` does not have, or has it in another shape.
    """
    opened: dict[str, Any] = {}
    for path in check_tensors(folder, architecture):
        file = safe_open(path, framework="pt")
        opened.update(dict.fromkeys(file.keys(), file))
    shapes = architecture.tensor_shapes()
    for tensors, parameter in own_parameters(model, architecture):
        group = sharing_group(tensors)
        fill(parameter, tensors, shapes, architecture.num_kv_heads, group.rank(), group.size(),
             lambda name, where: opened[name].get_slice(name)[where])


def fill(parameter: Tensor, tensors: HFTensors, shapes: dict[str, tuple[int, ...]], num_kv_heads: int, rank: int, size: int,
         read: Read) -> None:
    """Fill `parameter`, the share of `rank` out of `size` of `tensors`, with what `read` gives for (Hugging Face name, part of it).

    `shapes` are those of the whole tensors, `num_kv_heads` those of the whole model. Raises ValueError where the parameter's shape is another.
    """
    expected = shard_shape(tensors, shapes, size)
    if tuple(parameter.shape) != expected:
        raise ValueError(f"{' + '.join(tensors.names)}: the parameter of rank {rank} of {size} has shape {tuple(parameter.shape)} instead of "
                         f"{expected}. Build the model with the sizes of config.json, its vocabulary padded to {size} ranks")
    parts = [read(name, share_of(shapes[name], tensors.split, rank, size)) for name in tensors.names]
    joined = join(parts, num_kv_heads // size if tensors.split is Split.rows else num_kv_heads)
    parameter[: len(joined)].copy_(joined)
    parameter[len(joined):].zero_()

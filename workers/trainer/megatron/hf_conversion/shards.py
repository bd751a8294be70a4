"""What this rank holds of the model, as Megatron-core laid it out, and how Hugging Face tensors lie in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion.names import HFTensors, hf_tensors, share_of

ADAPTERS = "adapters."
"""How the names of parameters begin that are not in a Hugging Face folder (lora/low_rank.py)."""


def pieces_of(model: Any) -> list[Any]:
    """The GPTModels that are this rank's part of a model: several, in their order, where pipeline stages are interleaved (a ModuleList)."""
    return list(model) if isinstance(model, torch.nn.ModuleList) else [model]


def own_parameters(model: Any, architecture: Architecture) -> Iterator[tuple[HFTensors, torch.nn.Parameter]]:
    """The parameters of this rank's `model`, in its order, each with what it holds a share of; not those of adapters.

    With tied embeddings the last of several pipeline stages has an output layer of its own, which holds the embedding again.
    """
    for piece in pieces_of(model):
        yield from _own_parameters(piece, architecture)


def _own_parameters(model: Any, architecture: Architecture) -> Iterator[tuple[HFTensors, torch.nn.Parameter]]:
    layers = model.decoder.layers
    first_layer = layers[0].layer_number - 1 if len(layers) else 0
    first_expert = 0
    if architecture.mixture is not None:
        first_expert = parallel_state.get_expert_model_parallel_rank() * experts_per_rank(architecture)
    for name, parameter in model.named_parameters():
        if name.startswith(ADAPTERS):
            continue
        again = architecture.tied and name == "output_layer.weight"
        yield hf_tensors("embedding.word_embeddings.weight" if again else name, first_layer, first_expert, architecture.latent is not None), parameter


def experts_per_rank(architecture: Architecture) -> int:
    """Experts of each layer that a rank holds."""
    assert architecture.mixture is not None
    return architecture.mixture.num_experts // parallel_state.get_expert_model_parallel_world_size()


def sharing_group(tensors: HFTensors) -> dist.ProcessGroup:
    """The ranks that hold the shares of `tensors`, in order: those of tensor parallelism, which may be others for experts."""
    if tensors.expert is None:
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def shard_shape(tensors: HFTensors, shapes: dict[str, tuple[int, ...]], size: int) -> tuple[int, ...]:
    """Shape of one rank's parameter, where `size` ranks share `tensors`; `shapes` are those of the whole Hugging Face tensors."""
    first = [part.stop for part in share_of(shapes[tensors.names[0]], tensors.split, 0, size)]
    rows = sum(share_of(shapes[name], tensors.split, 0, size)[0].stop for name in tensors.names)
    return (rows, *first[1:])


def join(parts: list[Tensor], num_kv_heads: int) -> Tensor:
    """A parameter from its parts: 1 as it is, 2 gate and up, 3 the queries, keys and values of `num_kv_heads` key/value heads."""
    if len(parts) == 3:
        return torch.cat([part.reshape(num_kv_heads, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def separate(parameter: Tensor, num_parts: int, num_kv_heads: int, head_dim: int) -> list[Tensor]:
    """The inverse of `join`."""
    if num_parts == 3:
        by_head = parameter.reshape(num_kv_heads, -1, *parameter.shape[1:])
        return [part.flatten(0, 1) for part in by_head.split([by_head.shape[1] - 2 * head_dim, head_dim, head_dim], dim=1)]
    return [parameter] if num_parts == 1 else list(parameter.chunk(num_parts))

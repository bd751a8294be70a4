"""Gathers the parameters of all ranks, one at a time, as Hugging Face tensors: on rank 0, or each where it is held.

All ranks go through the parameters of the whole model in one order that follows from the architecture alone, so nothing has to be
agreed. For each of them:

    shares of one pipeline stage --gather over tensor parallelism--> its first rank
    an expert of another rank    --broadcast over expert parallelism--> rank of the stage's first experts
    another stage                --broadcast over pipeline parallelism--> rank 0 --separate--> Hugging Face tensors

To publish them, the first step is enough (`iter_held_tensors`): nothing moves between stages, nor between groups of experts. To send them to
engines (`iter_shards`), it ends on the rank that is to send, or is left out where that sends no more than it holds.

Where a model has adapters, `merged` makes each rank's share of a weight what it is with them, before anything moves.

Ranks that hold nothing but what others hold too (data and context parallelism) do nothing. Broadcasts use connections that the groups
have anyway, while sending between two ranks would open further ones in NCCL; ranks that a broadcast only passes through keep no more of
it than a piece of `PIECE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion.holders import Shard
from workers.trainer.megatron.hf_conversion.names import HFTensors, Split, all_hf_tensors, expert_rank_of, stage_of
from workers.trainer.megatron.hf_conversion.shards import own_parameters, pieces_of, separate, shard_shape, sharing_group
from workers.trainer.megatron.parallel import process_group

PIECE_BYTES = 256 * 2**20


Merged = Callable[[Tensor], Tensor]
"""A parameter, or what takes its place."""


class ExportError(RuntimeError):
    """A model that does not hold what its architecture says, as this rank found. Its text names what."""


def _as_it_is(parameter: Tensor) -> Tensor:
    return parameter


@torch.no_grad()
def iter_hf_tensors(model: Any, architecture: Architecture, merged: Merged = _as_it_is) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, contiguous tensor) on rank 0, nothing on the others; all ranks call this together and exhaust it.

    Every tensor of `architecture` comes exactly once, in an order that depends on the architecture alone, in the model's `params_dtype`, on
    its device. Rank 0 holds at most one parameter of the whole model besides its own. A tensor may share memory with the model: copy it
    before the next training step. Raises ExportError where a rank lacks a parameter, or holds one of the wrong shape or that nobody asks for.
    """
    gathering = _whole(model, architecture, merged)
    yield from gathering.through(gathering.shards)


@torch.no_grad()
def iter_held_tensors(model: Any, architecture: Architecture, merged: Merged = _as_it_is) -> Iterator[tuple[str, Tensor]]:
    """As `iter_hf_tensors`, but every tensor comes on the rank that publishes it (`names.sources`, `own_source`)."""
    gathering = _whole(model, architecture, merged)
    yield from gathering.through(gathering.held)


@torch.no_grad()
def iter_shards(model: Any, architecture: Architecture, sending: Iterable[tuple[Shard, int]], merged: Merged = _as_it_is) -> Iterator[list[Tensor]]:
    """For each (shard, rank that sends it) of `sending` its pieces on that rank, nothing elsewhere; all ranks call this together and exhaust it.
    As `iter_hf_tensors` otherwise."""
    gathering = _whole(model, architecture, merged)
    for shard, source in sending:
        yield gathering.pieces(shard, source)


@torch.no_grad()
def iter_other_tensors(model: Any, architecture: Architecture, own: Mapping[tuple[str, ...], Tensor], shapes: dict[str, tuple[int, ...]],
                       whole: Sequence[HFTensors]) -> Iterator[tuple[str, Tensor]]:
    """As `iter_hf_tensors`, of the tensors `whole`, of `shapes`, which are none of the architecture's: this rank's shares are `own`."""
    gathering = _Gathering(model, architecture, own, shapes, whole, _as_it_is)
    yield from gathering.through(gathering.shards)


def _own(model: Any, architecture: Architecture) -> dict[tuple[str, ...], Tensor]:
    return {tensors.names: parameter for tensors, parameter in own_parameters(model, architecture)}


def own_source() -> int | None:
    """The number of this rank among those that publish, as in `names.sources`; None for one that holds nothing but what others hold too."""
    if parallel_state.get_expert_data_parallel_rank() or parallel_state.get_expert_tensor_parallel_rank():
        return None
    return (parallel_state.get_pipeline_model_parallel_rank() * parallel_state.get_expert_model_parallel_world_size()
            + parallel_state.get_expert_model_parallel_rank())


def assembled(tensors: HFTensors, shards: Tensor, architecture: Architecture, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors in `shards` [number of shares, *shape of a share], views of it where they lie in one piece.

    `shapes` are those that they must have. Raises ExportError where they have others.
    """
    size = len(shards)
    if size == 1 or (tensors.split is Split.rows and len(tensors.names) == 1):
        parts = [[part] for part in separate(shards.flatten(0, 1), len(tensors.names), architecture.num_kv_heads, architecture.head_dim)]
    else:
        kv_heads = architecture.num_kv_heads // size
        by_share = [separate(shard, len(tensors.names), kv_heads, architecture.head_dim) for shard in shards]
        parts = [list(part) for part in zip(*by_share, strict=True)]
    for name, shares in zip(tensors.names, parts, strict=True):
        tensor = shares[0] if len(shares) == 1 else torch.cat(shares, dim=1 if tensors.split is Split.columns else 0)
        tensor = tensor[: shapes[name][0]].contiguous()  # without the padding of the vocabulary
        if tuple(tensor.shape) != shapes[name]:
            raise ExportError(f"{name}: has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        yield name, tensor


def _whole(model: Any, architecture: Architecture, merged: Merged) -> _Gathering:
    """Of all parameters of `model`."""
    return _Gathering(model, architecture, _own(model, architecture), architecture.tensor_shapes(), list(all_hf_tensors(architecture)), merged)


class _Gathering:
    """Brings parameters together. Every rank asks it for the same parameters in the same order."""

    def __init__(self, model: Any, architecture: Architecture, own: Mapping[tuple[str, ...], Tensor], shapes: dict[str, tuple[int, ...]],
                 whole: Sequence[HFTensors], merged: Merged) -> None:
        self._architecture, self._own, self._shapes, self._whole, self._merged = architecture, own, shapes, whole, merged
        self._dtype, self._device = pieces_of(model)[0].config.params_dtype, next(model.parameters()).device
        self._stage = parallel_state.get_pipeline_model_parallel_rank()
        self._num_stages, self._num_pieces = parallel_state.get_pipeline_model_parallel_world_size(), len(pieces_of(model))
        self._expert_rank = parallel_state.get_expert_model_parallel_rank()
        self._num_expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        self._scratch = torch.empty(0, dtype=self._dtype, device=self._device)
        known = {tensors.names for tensors in whole}
        if unknown := [" + ".join(names) for names in self._own if names not in known]:
            raise ExportError(f"rank {process_group.rank()} holds {unknown[0]}, which the architecture does not have")

    def through(self, get: Callable[[HFTensors], Tensor | None]) -> Iterator[tuple[str, Tensor]]:
        """All tensors, one after the other, where `get` (`held` or `shards`) gives them."""
        for tensors in self._whole:
            if (shards := get(tensors)) is not None:
                yield from assembled(tensors, shards, self._architecture, self._shapes)

    def held(self, tensors: HFTensors) -> Tensor | None:
        """On the first rank of those that hold `tensors`: their shares, [number of shares, *shape of a share]; on other ranks None."""
        stage, owner = self._place_of(tensors)
        if _is_replica(tensors) or self._stage != stage or (tensors.expert is not None and self._expert_rank != owner):
            return None
        return self._gathered(tensors, sharing_group(tensors))

    def shards(self, tensors: HFTensors) -> Tensor | None:
        """As `held`, but on rank 0."""
        group, found = sharing_group(tensors), self.held(tensors)
        if _is_replica(tensors) or group.rank():
            return None
        (stage, owner), shape = self._place_of(tensors), self._shape_of(tensors, group)
        if owner and self._stage == stage:
            found = self._moved(found, shape, owner, parallel_state.get_expert_model_parallel_group())
        if stage and not (tensors.expert is not None and self._expert_rank):
            found = self._moved(found, shape, stage, parallel_state.get_pipeline_model_parallel_group())
        return found if process_group.rank() == 0 else None

    def pieces(self, shard: Shard, source: int) -> list[Tensor]:
        """On rank `source` the pieces of `shard`, elsewhere none."""
        tensors, group = shard.tensors, sharing_group(shard.tensors)
        ranks = dist.get_process_group_ranks(group)
        if source not in ranks or tensors.names not in self._own:
            return []
        if shard.share is None:
            found = self._gathered(tensors, group, ranks.index(source))
            return [] if found is None else [tensor for _, tensor in assembled(tensors, found, self._architecture, self._shapes)]
        if source != process_group.rank():
            return []
        kv_heads = self._architecture.num_kv_heads // group.size()
        parts = separate(self._share(tensors, group), len(tensors.names), kv_heads, self._architecture.head_dim)
        return [part[: piece.shape[0]] for part, piece in zip(parts, shard.pieces, strict=True)]  # without the padding of the vocabulary

    def _place_of(self, tensors: HFTensors) -> tuple[int, int]:
        return (stage_of(tensors, self._architecture.num_layers, self._num_stages, self._num_pieces),
                expert_rank_of(tensors, self._architecture, self._num_expert_ranks))

    def _shape_of(self, tensors: HFTensors, group: dist.ProcessGroup) -> tuple[int, ...]:
        return (1 if tensors.split is Split.none else group.size(), *shard_shape(tensors, self._shapes, group.size()))

    def _share(self, tensors: HFTensors, group: dist.ProcessGroup) -> Tensor:
        """This rank's."""
        own, shape = self._own.get(tensors.names), self._shape_of(tensors, group)[1:]
        if own is None or tuple(own.shape) != shape:
            raise ExportError(f"rank {process_group.rank()} holds {' + '.join(tensors.names)} "
                              + ("not at all" if own is None else f"in shape {tuple(own.shape)} instead of {shape}"))
        return self._merged(own).detach().to(self._dtype)

    def _gathered(self, tensors: HFTensors, group: dist.ProcessGroup, target: int = 0) -> Tensor | None:
        """The shares, on rank `target` of `group`; its own alone, without a copy, where that is all of it."""
        share, shape = self._share(tensors, group), self._shape_of(tensors, group)
        if shape[0] == 1:
            return share[None] if group.rank() == target else None
        shares = torch.empty(shape, dtype=self._dtype, device=self._device) if group.rank() == target else None
        dist.gather(share, None if shares is None else list(shares), group=group, group_dst=target)
        return shares

    def _moved(self, found: Tensor | None, shape: tuple[int, ...], source: int, group: dist.ProcessGroup) -> Tensor | None:
        """What rank `source` of `group` has found, on its first rank; the others take part without keeping it."""
        if group.rank() == 0:
            found = torch.empty(shape, dtype=self._dtype, device=self._device)
        flat = None if found is None else found.flatten()
        length, piece = torch.Size(shape).numel(), PIECE_BYTES // self._dtype.itemsize
        for start in range(0, length, piece):
            count = min(piece, length - start)
            if flat is None and len(self._scratch) < count:
                self._scratch = self._scratch.new_empty(count)
            dist.broadcast(self._scratch[:count] if flat is None else flat[start:start + count], group=group, group_src=source)
        return found if group.rank() == 0 else None


def _is_replica(tensors: HFTensors) -> bool:
    """Whether this rank holds of `tensors` only what another rank, of an earlier copy, holds too."""
    if tensors.expert is not None:
        return bool(parallel_state.get_expert_data_parallel_rank())
    return bool(parallel_state.get_data_parallel_rank(with_context_parallel=True))

"""One rank's tensors of the trainer's state on their way into a folder.

    main thread, all ranks     capture: the live tensors, or copies of them in the host's memory
    any thread, rank R         write_part: __R_0.distcp, hashed as it is written, on disk  --where each tensor lies--> mailbox
    any thread, rank 0         write_index: all ranks' --> .metadata, common.pt, metadata.json

The folder is then one of Megatron's dist_checkpointing, format torch_dist. Megatron's own strategies write it with collectives or from
forked processes; forks do not go with the threads of gloo and CUDA, and collectives would have to keep in step with training's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from blake3 import blake3
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult


@dataclass(frozen=True)
class Shard:
    """A part of the tensor `name` of `shape`: what begins at `offset`; `values` on any device."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


class WrittenShard(msgspec.Struct, frozen=True):
    """Where a shard lies: `length` bytes from `start` of its rank's file. `dtype` as torch names it."""

    name: str
    dtype: str
    shape: list[int]
    offset: list[int]
    sizes: list[int]
    start: int
    length: int


class WrittenPart(msgspec.Struct, frozen=True):
    """What one rank has written: its file (bytes, BLAKE3 digest in hex), or why it could not."""

    file: str = ""
    size: int = 0
    digest: str = ""
    shards: list[WrittenShard] = []
    problem: str = ""


def capture(tensors: dict[str, Any], copy: bool) -> list[Shard]:
    """The shards that this rank is to write, of `tensors` in Megatron's sharded form; `copy` them to the host's memory."""
    apply_factories(tensors)
    own = [entry for entry in nested_values(tensors) if isinstance(entry, ShardedTensor) and is_main_replica(entry.replica_id)]
    shards = []
    for entry in own:
        values = entry.data.detach().reshape((1,) * entry.prepend_axis_num + tuple(entry.local_shape))
        values = values.to("cpu", copy=True) if copy else values
        shards.append(Shard(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), values))
    return shards


def write_part(folder: Path, rank: int, shards: Iterable[Shard]) -> WrittenPart:
    """Write the file of `rank` and bring it to disk. Raises OSError where that fails."""
    name, written = f"__{rank}_0.distcp", []
    with (folder / name).open("xb") as file:
        hashing = _HashingFile(file)
        for shard in shards:
            start, values = hashing.size, shard.values.cpu()
            if values.untyped_storage().nbytes() != values.nbytes:  # torch.save would write all of it
                values = values.clone()
            torch.save(values, hashing)  # type: ignore[arg-type]
            written.append(WrittenShard(shard.name, str(values.dtype).removeprefix("torch."), list(shard.shape), list(shard.offset),
                                        list(values.shape), start, hashing.size - start))
        file.flush()
        os.fsync(file.fileno())
    return WrittenPart(name, hashing.size, hashing.digest(), written)


def write_index(folder: Path, parts: list[WrittenPart], common: dict[str, Any]) -> None:
    """Write what makes the ranks' files one state. Raises ValueError where they do not make up whole tensors, OSError where writing fails."""
    plans = [SavePlan([_item(shard) for shard in part.shards]) for part in parts]
    _, metadata = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    _check_complete(metadata.state_dict_metadata)
    results = [[WriteResult(_index(shard), shard.length, _StorageInfo(part.file, shard.start, shard.length)) for shard in part.shards]
               for part in parts]
    FileSystemWriter(folder, sync_files=True).finish(metadata, results)
    torch.save(common, folder / COMMON_STATE_FNAME)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))



def _check_complete(tensors: dict[str, Any]) -> None:
    """Torch compares the volumes only where several ranks have written; it has checked that nothing overlaps or sticks out."""
    for name, whole in tensors.items():
        volume = sum(chunk.sizes.numel() for chunk in whole.chunks)
        if volume != whole.size.numel():
            raise ValueError(f"{name}: {volume} of {whole.size.numel()} elements were written")


def _index(shard: WrittenShard) -> MetadataIndex:
    return MetadataIndex(shard.name, torch.Size(shard.offset))


def _item(shard: WrittenShard) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=getattr(torch, shard.dtype)), torch.Size(shard.shape))
    return WriteItem(_index(shard), WriteItemType.SHARD, tensor_data=data)


class _HashingFile:
    """What torch.save needs of a file; counts and hashes what it passes on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._hash, self.size = file, blake3(), 0

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        self._hash.update(view)
        self.size += len(view)
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    def digest(self) -> str:
        return self._hash.hexdigest()

"""Publishes versions of the weights: a folder each, complete or not there at all, and old ones removed.

    tensors --shards of at most SHARD_BYTES--> .<version>.tmp/ --manifest--> rename to <version>/  --> Announcement
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from workers.messages.types import Announcement, Version
from workers.weights.manifest import WeightsError, make_manifest

SHARD_BYTES = 1 << 29
RESERVE_BYTES = 1 << 20
KEPT = 2


class Publisher:
    """Publishes into `folder`, which it makes (0700), or takes over from an earlier incarnation. `dtype`: what the engines hold."""

    def __init__(self, folder: Path, model_folder: Path, dtype: torch.dtype) -> None:
        self._folder, self._model_folder, self._dtype = folder, model_folder, dtype
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            state = folder.lstat()
        except OSError as error:
            raise WeightsError(f"weights.dir: {folder} cannot be made ({error.strerror}). Remove it if it is left over, or choose another "
                               "weights.dir") from error
        if state.st_uid != os.getuid() or state.st_mode & 0o077 or not stat.S_ISDIR(state.st_mode):
            raise WeightsError(f"weights.dir: {folder} is not a private folder of this user (in a shared place it might be somebody else's). "
                               "Remove it, or choose another weights.dir")
        for leftover in folder.glob(".*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: Version) -> Announcement:
        """Write `tensors` (Hugging Face names) as `version`. Raises `WeightsError` where there is no room; then nothing is left."""
        temporary, final = self._folder / f".{version}.tmp", self._folder / str(version)
        try:
            temporary.mkdir(mode=0o700)
            write_hf_folder(temporary, tensors, self._model_folder, self._dtype)
            digest = make_manifest(temporary, version)
            os.rename(temporary, final)
        except OSError as error:
            raise WeightsError(_no_room(temporary, 0, shutil.disk_usage(self._folder).free) + f" ({error})") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return Announcement(version, str(final), digest)

    def remove_older(self, needed: Version) -> None:
        """Remove versions that nobody fetches any more (older than `needed`), always keeping the newest `KEPT`."""
        versions = sorted(Version.parse(path.name) for path in self._folder.iterdir() if not path.name.startswith("."))
        for version in versions[:-KEPT]:
            if version < needed:
                shutil.rmtree(self._folder / str(version))


def write_hf_folder(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], model_folder: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder: config.json with `dtype`, and sharded safetensors. Raises `WeightsError` if the disk is full."""
    config = json.loads((model_folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    index: dict[str, str] = {}
    for number, shard in enumerate(_shards(tensors, dtype)):
        name, size = f"model-{number:05d}.safetensors", sum(tensor.nbytes for tensor in shard.values())
        free = shutil.disk_usage(folder).free
        if free < size + RESERVE_BYTES:
            raise WeightsError(_no_room(folder, size, free))
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"{_no_room(folder, size, free)} ({error})") from error
        index.update(dict.fromkeys(shard, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _no_room(folder: Path, size: int, free: int) -> str:
    return (f"{folder.parent}: {free >> 20} MiB are free, the next shard of the weights takes {size >> 20} MiB. "
            "Free some space, or choose another folder (weights.dir for published versions, run.dir for the final model)")


def _shards(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        tensor = tensor.detach().to("cpu", dtype, copy=True).contiguous()  # a copy: views of one storage cannot be saved
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name], size = tensor, size + tensor.nbytes
    if shard:
        yield shard

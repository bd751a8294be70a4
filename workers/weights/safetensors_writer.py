"""Puts tensors into safetensors files laid out beforehand (layout.py): into a node's memory, or onto a disk.

    MappedShards    allocated, mapped and, with CUDA, pinned before they are needed; a tensor is converted and copied into place at once
    write_hf_folder a Hugging Face folder on a disk, tensor by tensor
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.config import Dtype
from workers.model.architecture import ModelError, read_architecture
from workers.model.frozen import read_frozen
from workers.weights.layout import ShardFile, lay_out, small_files
from workers.weights.manifest import WeightsError

RESERVE_BYTES = 1 << 20
PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device."""


class MappedShards:
    """The `files` of one version, allocated in `folder` by `allocate` (folder, name, size) and mapped, their headers written.

    Raises `WeightsError` or OSError where there is no room.
    """

    def __init__(self, folder: Path, files: Sequence[ShardFile], dtype: torch.dtype, allocate: Callable[[Path, str, int], Path]) -> None:
        self._dtype = dtype
        self._contents = [_map(allocate(folder, file.name, file.size), file.size) for file in files]
        self._where = {name: (number, place) for number, file in enumerate(files) for name, place in file.places.items()}
        self._missing = set(self._where)
        for content, file in zip(self._contents, files, strict=True):
            content[: len(file.header)] = file.header
        self._pinned = [_pin(content) for content in self._contents]

    def put(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor into its place; from a CUDA device perhaps only until `complete`. Raises `WeightsError` on one that has none."""
        if name not in self._where:
            raise WeightsError(f"{name}: the layout of the weights has no such tensor")
        number, place = self._where[name]
        if tuple(tensor.shape) != place.shape:
            raise WeightsError(f"{name}: has shape {tuple(tensor.shape)} instead of {place.shape}")
        target = torch.frombuffer(self._contents[number], dtype=self._dtype, count=math.prod(place.shape), offset=place.offset).view(place.shape)
        source = tensor.detach()
        if source.is_cuda:
            target.copy_(source.to(self._dtype), non_blocking=self._pinned[number])
        else:
            target.copy_(source)
        self._missing.discard(name)

    def complete(self) -> None:
        """Return when everything is in its place. Raises `WeightsError` where a tensor is missing."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        if self._missing:
            raise WeightsError(f"{len(self._missing)} tensors of the layout were not given, {min(self._missing)} among them")

    def close(self) -> None:
        """Let go of the memory; the files stay."""
        for content, pinned in zip(self._contents, self._pinned, strict=True):
            if pinned:
                torch.cuda.cudart().cudaHostUnregister(_address(content))
        self._contents.clear()
        self._pinned.clear()


def _map(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # its pages are there before training waits for them
    finally:
        os.close(descriptor)


def _pin(content: mmap.mmap) -> bool:
    """Have CUDA copy straight into `content`; where it cannot (a file on a disk), it copies by way of a buffer of its own."""
    if not torch.cuda.is_available():
        return False
    pinned = int(torch.cuda.cudart().cudaHostRegister(_address(content), len(content), PORTABLE)) == 0
    if not pinned:  # the runtime keeps the error, and torch would take it for one of its next kernel's
        ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}").cudaGetLastError()
    return pinned


def _address(content: mmap.mmap) -> int:
    return torch.frombuffer(content, dtype=torch.uint8).data_ptr()


def write_hf_folder(folder: Path, tensors: Iterable[tuple[str, Tensor]], model_folder: Path, dtype: Dtype) -> None:
    """Write a Hugging Face folder of the architecture in `model_folder`: config.json with `dtype`, and safetensors files, one of which has what is
    frozen as it is in `model_folder`, in float32.

    Raises `WeightsError` if the disk is full, where `tensors` are not those of the architecture, or `model_folder` cannot be read.
    """
    free, size = shutil.disk_usage(folder).free, 0
    try:
        architecture = read_architecture(model_folder)
        files, frozen = lay_out(architecture.tensor_shapes(), dtype), lay_out(architecture.frozen_shapes(), Dtype.float32, name="frozen")
        size = sum(file.size for file in files)
        if free < size + RESERVE_BYTES:
            raise OSError(errno.ENOSPC, "not enough for them")
        for name, content in small_files(files + frozen, model_folder, dtype).items():
            (folder / name).write_bytes(content)
        _write(folder, files, tensors, getattr(torch, dtype.value))
        _write(folder, frozen, read_frozen(model_folder, architecture).items(), torch.float32)
    except ModelError as error:
        raise WeightsError(str(error)) from error
    except OSError as error:
        raise WeightsError(f"{folder}: {free >> 20} MiB are free, the weights take {size >> 20} MiB ({error.strerror or error}). Free some space, or "
                           "choose another folder: run.dir, or weights.dir for what a node holds") from error


def _write(folder: Path, files: Sequence[ShardFile], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    where = {name: (file, place) for file in files for name, place in file.places.items()}
    missing, descriptors = set(where), {file.name: os.open(folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) for file in files}
    try:
        for file in files:
            _write_at(descriptors[file.name], memoryview(file.header), 0)
        for name, tensor in tensors:
            kept = tensor.detach().to("cpu", dtype).contiguous()
            if name not in where or tuple(kept.shape) != where[name][1].shape:
                raise WeightsError(f"{name}: no tensor of this architecture, or not of shape {tuple(kept.shape)}")
            file, place = where[name]
            _write_at(descriptors[file.name], kept.flatten().view(torch.uint8).numpy().data, place.offset)
            missing.discard(name)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)
    if missing:
        raise WeightsError(f"{folder}: {len(missing)} tensors of the architecture were not given, {min(missing)} among them")


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while len(content):
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written

"""Differences between two versions of the weights, chunk by chunk, bit for bit.

    chunk of v  XOR  same chunk of v-1  -->  byte planes (bf16: all low bytes, then all high ones)  -->  zstd, level 1

A training step changes few bits of most parameters, so the planes are mostly zeros. A chunk whose difference is not smaller than
itself has none and travels raw. The digest of the decoded chunk is checked as ever: exactness is not a matter of trust.

A delta file is a header and a log of records, so that whoever gets deltas can append them as they come, and hand them on as they are:

    header   magic, epoch and step of the base          record   length of the name, offset of the chunk, length, name, the difference
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard

from workers.messages.parts import Version
from workers.weights.manifest import WeightsError
from workers.weights.mmap import MappedFiles

LEVEL = 1
MAGIC = b"headway delta 1\n"
HEADER = struct.Struct("<16sQQ")
RECORD = struct.Struct("<HQQ")
WIDTHS = (1, 2, 4, 8)


class DeltaSize(NamedTuple):
    """Bytes of the files that were compared, and of what travels instead (a chunk without a difference counts as it is)."""

    raw: int
    encoded: int


class Deltas:
    """The differences of one version to `base`, in a file. Thread-safe: some append while others read."""

    def __init__(self, path: Path, base: Version, descriptor: int) -> None:
        """Use `create` or `open`."""
        self.base = base
        self._path, self._descriptor, self._end = path, descriptor, HEADER.size
        self._places: dict[tuple[str, int], tuple[int, int]] = {}
        self._appending = threading.Lock()

    @staticmethod
    def create(path: Path, base: Version) -> Deltas:
        """Make `path` anew (0600). Raises `WeightsError` where there is no room for it."""
        try:
            path.unlink(missing_ok=True)
            deltas = Deltas(path, base, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            os.pwrite(deltas._descriptor, HEADER.pack(MAGIC, base.epoch, base.step), 0)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be written ({error.strerror}). Free some memory, or set weights.delta=false") from error
        return deltas

    @staticmethod
    def open(path: Path) -> Deltas:
        """An existing file, for reading; a record that was cut short is left out. Raises `WeightsError` where it is no delta file."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            header = os.pread(descriptor, HEADER.size, 0)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read ({error.strerror})") from error
        if len(header) != HEADER.size or not header.startswith(MAGIC):
            os.close(descriptor)
            raise WeightsError(f"{path}: not a delta file")
        _, epoch, step = HEADER.unpack(header)
        deltas = Deltas(path, Version(epoch, step), descriptor)
        deltas._read_places()
        return deltas

    def _read_places(self) -> None:
        size = os.fstat(self._descriptor).st_size
        while len(record := os.pread(self._descriptor, RECORD.size, self._end)) == RECORD.size:
            name_bytes, offset, length = RECORD.unpack(record)
            start = self._end + RECORD.size + name_bytes
            if start + length > size:
                break
            name = os.pread(self._descriptor, name_bytes, self._end + RECORD.size).decode(errors="replace")
            self._places[name, offset] = start, length
            self._end = start + length

    def __del__(self) -> None:
        os.close(self._descriptor)

    def append(self, name: str, offset: int, encoded: bytes | memoryview) -> None:
        """Add the difference of the chunk at `offset` of file `name`. Raises `WeightsError` where there is no room."""
        label = name.encode()
        with self._appending:
            start = self._end + RECORD.size + len(label)
            record = [RECORD.pack(len(label), offset, len(encoded)), label, encoded]
            try:
                if os.pwritev(self._descriptor, record, self._end) != start + len(encoded) - self._end:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise WeightsError(f"{self._path}: cannot be written ({error.strerror}). Free some memory, or set weights.delta=false") from error
            self._places[name, offset], self._end = (start, len(encoded)), start + len(encoded)

    def find(self, name: str, offset: int) -> bytes | None:
        """The difference of one chunk, or None where it travels raw."""
        place = self._places.get((name, offset))
        return None if place is None else os.pread(self._descriptor, place[1], place[0])


def encode(new: memoryview, base: memoryview, width: int) -> bytes | None:
    """The difference of two pieces of the same size, or None where it is not smaller. `width`: bytes of a parameter (2 for bf16, 4 for
    float32); it stands in the first byte."""
    difference = np.bitwise_xor(np.frombuffer(new, np.uint8), np.frombuffer(base, np.uint8))
    whole = len(difference) - len(difference) % width
    planes = np.concatenate([difference[:whole].reshape(-1, width).T.ravel(), difference[whole:]])
    encoded = bytes([width]) + zstandard.ZstdCompressor(level=LEVEL).compress(planes.data)
    return encoded if len(encoded) < len(new) else None


def decode(encoded: bytes | memoryview, base: memoryview) -> memoryview:
    """Inverse of `encode`. Raises ValueError on what cannot be one."""
    width = encoded[0] if len(encoded) else 0
    if width not in WIDTHS:
        raise ValueError(f"parameters of {width} bytes: must be one of {', '.join(map(str, WIDTHS))}")
    try:
        if zstandard.frame_content_size(encoded[1:]) != len(base):  # before anything is unpacked: it may pretend to be huge
            raise ValueError(f"not the difference of {len(base)} bytes")
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(encoded[1:]), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(planes) != len(base):
        raise ValueError(f"{len(planes)} bytes instead of {len(base)}")
    whole = len(planes) - len(planes) % width
    content = np.empty(len(planes), np.uint8)
    for place, plane in enumerate(planes[:whole].reshape(width, -1)):  # one by one: five times as fast as the transposed array at once
        content[place:whole:width] = plane
    content[whole:] = planes[whole:]
    np.bitwise_xor(content, np.frombuffer(base, np.uint8), out=content)
    return content.data


def make_deltas(folder: Path, base_folder: Path, base: Version, names: Sequence[str], path: Path, *, chunk_bytes: int, width: int,
                threads: int = 1) -> DeltaSize:
    """Write to `path` the differences of the files `names` of `folder` to those of `base_folder` (version `base`). What is not there
    travels raw. Raises OSError, `WeightsError`."""
    files = MappedFiles(folder, names)
    before = MappedFiles(base_folder, [name for name in names if (base_folder / name).is_file()])
    deltas = Deltas.create(path, base)
    pieces = [(name, offset, min(chunk_bytes, files.size(name) - offset)) for name in names for offset in range(0, files.size(name), chunk_bytes)]

    def compare(piece: tuple[str, int, int]) -> int:
        name, offset, size = piece
        new, old = files.view(*piece), before.view(*piece)
        encoded = encode(new, old, width) if new is not None and old is not None else None
        if encoded is None:
            return size
        deltas.append(name, offset, encoded)
        return len(encoded)

    with ThreadPoolExecutor(threads) as pool:
        return DeltaSize(sum(size for *_, size in pieces), sum(pool.map(compare, pieces)))

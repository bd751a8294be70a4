"""A version on its way into the node's store: its files, allocated, and which chunks of them are there.

    begin: .<version>.part/ with every file at its full size  --write: digest? in its place, noted--> finish: renamed to <version>/

What has arrived outlives the process that fetched it: the next one checks it by digest and goes on from there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workers.messages.parts import Version
from workers.run.digests import digest_of
from workers.weights.delta import Deltas, decode
from workers.weights.manifest import MANIFEST, Chunk, Manifest, WeightsError
from workers.weights.mmap import MappedFiles

REMOVERS = 8
FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)


class CorruptChunk(WeightsError):
    """Bytes that are not those of the announced chunk."""


class Incoming:
    """Thread-safe: several threads write different chunks, others ask what is there."""

    def __init__(self, final: Path, manifest: Manifest, manifest_content: bytes) -> None:
        """Use `begin`."""
        self.version, self.manifest, self.manifest_content = manifest.version, manifest, manifest_content
        self.folder = final.with_name(f".{final.name}.part")
        self.chunks = manifest.chunks()
        self.deltas: Deltas | None = None
        self._final, self._arrived_path, self._delta_path = final, final.with_name(f".{final.name}.arrived"), final.with_name(f".{final.name}.delta")
        self._arrived, self._keeps_deltas = bytearray(len(self.chunks)), True
        self._listeners: list[Callable[[Chunk], None]] = []
        self._changing = threading.Lock()

    @staticmethod
    def begin(final: Path, manifest_content: bytes, version: Version, threads: int = 1) -> Incoming:
        """Allocate the files, or take over what is there of them. `final`: the folder when complete. Raises `WeightsError`."""
        manifest = Manifest.decode(manifest_content)
        if manifest.version != version:
            raise WeightsError(f"{final}: the manifest is of version {manifest.version}, announced was {version}")
        incoming = Incoming(final, manifest, manifest_content)
        if not incoming._take_over(threads):
            Incoming.abandon(final)
            incoming._allocate(threads)
        return incoming

    def _allocate(self, threads: int) -> None:
        """The kernel clears every page, at a few GB/s a thread: by as many as there are, file by file."""
        try:
            self.folder.mkdir(mode=0o700)
            with ThreadPoolExecutor(threads) as pool:
                for _ in pool.map(lambda entry: allocate(self.folder / entry.name, entry.size), self.manifest.files):
                    pass
            allocate(self._arrived_path, len(self.chunks))
            (self.folder / MANIFEST).write_bytes(self.manifest_content)  # last: without it, nothing is taken over
        except OSError as error:
            Incoming.abandon(self._final)
            raise WeightsError(no_room(self.folder, self.manifest.size, error)) from error
        except WeightsError:
            Incoming.abandon(self._final)
            raise

    def _take_over(self, threads: int) -> bool:
        """Go on with what an earlier fetch of the same manifest left; every chunk that it noted is checked again."""
        try:
            if (self.folder / MANIFEST).read_bytes() != self.manifest_content:
                return False
            if any((self.folder / entry.name).stat().st_size != entry.size for entry in self.manifest.files):
                return False
            noted = self._arrived_path.read_bytes()
            if len(noted) != len(self.chunks):
                return False
            files = MappedFiles(self.folder, [entry.name for entry in self.manifest.files])
        except OSError:
            return False
        chunks = [chunk for chunk in self.chunks if noted[chunk.number]]
        with ThreadPoolExecutor(threads) as pool:
            for chunk, right in zip(chunks, pool.map(lambda chunk: _is_right(files, chunk), chunks), strict=True):
                self._arrived[chunk.number] = right
        return True

    def has(self, chunk: Chunk) -> bool:
        """Whether it has arrived."""
        return bool(self._arrived[chunk.number])

    def missing(self) -> list[Chunk]:
        """What has not arrived yet, in order."""
        return [chunk for chunk in self.chunks if not self._arrived[chunk.number]]

    def write(self, chunk: Chunk, buffer: memoryview | bytes) -> None:
        """Check the digest and put it in its place. Raises `CorruptChunk`; `WeightsError` where it cannot be written."""
        self._check(chunk, buffer)
        self._place(chunk, buffer)

    def write_delta(self, chunk: Chunk, encoded: memoryview, base: MappedFiles, base_version: Version) -> None:
        """Decode the difference to `base`, and `write` the chunk; the difference is kept, for others who want it. Raises as `write`."""
        before = base.view(chunk.name, chunk.offset, chunk.size)
        if before is None:
            raise CorruptChunk(f"{chunk.name}: version {base_version} has no chunk {chunk.index} to apply a difference to")
        try:
            content = decode(encoded, before)
        except ValueError as error:
            raise CorruptChunk(f"{chunk.name}: the difference for chunk {chunk.index} of version {self.version} is broken ({error})") from error
        self._check(chunk, content)
        self._keep(chunk, encoded, base_version)  # before the chunk is noted: whoever waits for that gets the difference
        self._place(chunk, content)

    def _check(self, chunk: Chunk, buffer: memoryview | bytes) -> None:
        if len(buffer) != chunk.size or digest_of(buffer) != chunk.digest:
            raise CorruptChunk(f"{chunk.name}: chunk {chunk.index} of version {self.version} is not what was announced")

    def _keep(self, chunk: Chunk, encoded: memoryview, base: Version) -> None:
        if not self._keeps_deltas:
            return
        try:
            with self._changing:
                if self.deltas is None:
                    self.deltas = Deltas.create(self._delta_path, base)
            self.deltas.append(chunk.name, chunk.offset, encoded)
        except WeightsError as error:
            self._keeps_deltas = False
            print(f"warning: {error}. Version {self.version} is handed on without differences", flush=True)

    def _place(self, chunk: Chunk, buffer: memoryview | bytes) -> None:
        try:
            _write_at(self.folder / chunk.name, buffer, chunk.offset)
            _write_at(self._arrived_path, b"\1", chunk.number)
        except OSError as error:
            raise WeightsError(no_room(self.folder, chunk.size, error)) from error
        with self._changing:
            self._arrived[chunk.number] = 1
            listeners = list(self._listeners)
        for arrived in listeners:
            arrived(chunk)

    def subscribe(self, arrived: Callable[[Chunk], None]) -> None:
        """Call `arrived` for each chunk from now on, in the thread that wrote it."""
        with self._changing:
            self._listeners.append(arrived)

    def finish(self) -> Path:
        """All chunks have arrived: the folder gets its final name. Raises `WeightsError` if one is missing."""
        if missing := self.missing():
            raise WeightsError(f"{self.folder}: {len(missing)} of {len(self.chunks)} chunks have not arrived")
        self.folder.rename(self._final)
        self._arrived_path.unlink(missing_ok=True)
        return self._final

    @staticmethod
    def last_arrival(final: Path) -> int:
        """When something last came of the version beside `final`, nanoseconds; 0 if nothing has."""
        try:
            return final.with_name(f".{final.name}.arrived").stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @staticmethod
    def abandon(final: Path) -> None:
        """Remove what has arrived beside `final`: nobody will go on with it."""
        remove_files(final.with_name(f".{final.name}.part"))
        for suffix in ("arrived", "delta"):
            final.with_name(f".{final.name}.{suffix}").unlink(missing_ok=True)


def allocate(path: Path, size: int) -> Path:
    """Make a file (0600) of `size` bytes, its memory reserved: writing to it, mapped or not, cannot fail for want of room. Raises
    `WeightsError` with the remedy where there is none; then there is no file."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        if size:
            os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise WeightsError(no_room(path, size, error)) from error
    finally:
        os.close(descriptor)
    return path


def remove_files(folder: Path) -> None:
    """Remove a version's folder, where there is one: its files by several threads, for the kernel takes a second for 10 GB."""
    with contextlib.suppress(OSError), ThreadPoolExecutor(REMOVERS) as pool:
        list(pool.map(lambda path: path.unlink(missing_ok=True), folder.iterdir()))
    shutil.rmtree(folder, ignore_errors=True)


def no_room(path: Path, size: int, error: OSError) -> str:
    """What to say when `size` bytes cannot be written to `path`."""
    if error.errno not in FULL:
        return f"{path}: cannot be written ({error.strerror})"
    free = shutil.disk_usage(path.parent).free
    return (f"{path}: {free >> 20} MiB are free, {size >> 20} MiB are needed ({error.strerror}). Free some memory (what lies in /dev/shm counts), "
            "or choose another folder with weights.dir")


def _is_right(files: MappedFiles, chunk: Chunk) -> bool:
    view = files.view(chunk.name, chunk.offset, chunk.size)
    return view is not None and digest_of(view) == chunk.digest


def _write_at(path: Path, buffer: memoryview | bytes, offset: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        view = memoryview(buffer)
        while view:
            written = os.pwrite(descriptor, view, offset)
            view, offset = view[written:], offset + written
    finally:
        os.close(descriptor)

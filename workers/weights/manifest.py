"""The manifest of published weights: which files, how long, with which digests (BLAKE3). No torch.

A published version is a folder: config.json, *.safetensors in Hugging Face's format, and manifest.json. The digest of
manifest.json travels in the announcement, on the authenticated channel, so nothing forged or cut short is ever loaded.

    file      [ chunk 0 | chunk 1 | ... | last, shorter ]      every chunk has a digest of its own: what a transfer moves and checks
    manifest  version, chunk_bytes, name, size, source and chunk digests of every file
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from workers.messages.parts import Version
from workers.run.digests import digest_of

MANIFEST = "manifest.json"
CHUNK_BYTES = 4 << 20

# Names are plain: a manifest never leads out of its folder, nor to a hidden file.
FileName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z", max_length=200)]
Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class WeightsError(RuntimeError):
    """Published weights that are missing, incomplete or not what was announced."""


class SourcesFailed(WeightsError):
    """No source brings a version now. It may be otherwise a little later, and what has arrived is kept."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its name, size in bytes, and the BLAKE3 digest (hex) of every chunk. `source`: which of `Announcement.sources` has it."""

    name: FileName
    size: Annotated[int, msgspec.Meta(ge=0)]
    source: Annotated[int, msgspec.Meta(ge=0)]
    chunks: list[Digest]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file: `number` counts over the whole manifest, `index` within the file; `offset` and `size` in bytes."""

    number: int
    name: str
    index: int
    offset: int
    size: int
    digest: str
    source: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of one version, cut into chunks of `chunk_bytes`."""

    version: Version
    chunk_bytes: Annotated[int, msgspec.Meta(ge=1)]
    files: list[FileEntry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.files)

    def encode(self) -> bytes:
        """The content of manifest.json; equal manifests have equal content."""
        return msgspec.json.encode(self)

    @staticmethod
    def decode(content: bytes) -> Manifest:
        """Inverse of `encode`. Raises `WeightsError` where the content contradicts itself."""
        try:
            manifest = msgspec.json.decode(content, type=Manifest)
        except msgspec.MsgspecError as error:
            raise WeightsError(f"malformed manifest: {error}") from error
        names = [entry.name for entry in manifest.files]
        if len(set(names)) != len(names) or MANIFEST in names:
            raise WeightsError(f"malformed manifest: the files {', '.join(names)} are not different ones")
        for entry in manifest.files:
            if len(entry.chunks) != num_chunks(entry.size, manifest.chunk_bytes):
                raise WeightsError(f"malformed manifest: {entry.name} of {entry.size} bytes has {len(entry.chunks)} chunks of {manifest.chunk_bytes}")
        return manifest

    def chunks(self) -> list[Chunk]:
        """Every chunk of every file, in order."""
        found: list[Chunk] = []
        for entry in self.files:
            for index, digest in enumerate(entry.chunks):
                offset = index * self.chunk_bytes
                size = min(self.chunk_bytes, entry.size - offset)
                found.append(Chunk(len(found), entry.name, index, offset, size, digest, entry.source))
        return found


def num_chunks(size: int, chunk_bytes: int) -> int:
    """How many chunks a file of `size` bytes has; an empty file has none."""
    return -(-size // chunk_bytes)


def describe_files(folder: Path, names: Sequence[str], chunk_bytes: int = CHUNK_BYTES, source: int = 0, threads: int = 1) -> list[FileEntry]:
    """Entries of the files `names` of `folder`, with all digests, computed by `threads` threads. Raises OSError where one cannot be read."""
    sizes = [(folder / name).stat().st_size for name in names]
    with ThreadPoolExecutor(threads) as pool:
        return [FileEntry(name, size, source, list(pool.map(digest_of, _pieces(folder / name, size, chunk_bytes))))
                for name, size in zip(names, sizes, strict=True)]


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write manifest.json; returns its digest."""
    content = manifest.encode()
    (folder / MANIFEST).write_bytes(content)
    return digest_of(content)


def make_manifest(folder: Path, version: Version, chunk_bytes: int = CHUNK_BYTES, threads: int = 1) -> str:
    """Write the manifest of all files in `folder`; returns its digest."""
    names = sorted(path.name for path in folder.iterdir())
    return write_manifest(folder, Manifest(version, chunk_bytes, describe_files(folder, names, chunk_bytes, 0, threads)))


def verify(folder: Path, version: Version, digest: str, threads: int = 1) -> Manifest:
    """Check that `folder` holds exactly what was announced. Raises `WeightsError` naming the first difference."""
    try:
        content = (folder / MANIFEST).read_bytes()
        if digest_of(content) != digest:
            raise WeightsError(f"{folder}: the manifest is not the announced one")
        manifest = Manifest.decode(content)
        if manifest.version != version:
            raise WeightsError(f"{folder}: holds version {manifest.version}, announced was {version}")
        surplus = {path.name for path in folder.iterdir()} - {entry.name for entry in manifest.files} - {MANIFEST}
        if surplus:
            raise WeightsError(f"{folder}: holds {', '.join(sorted(surplus))}, which was not announced")
        for entry in manifest.files:
            size = (folder / entry.name).stat().st_size
            if size != entry.size:
                raise WeightsError(f"{folder / entry.name}: not the announced content ({size} bytes instead of {entry.size})")
        with ThreadPoolExecutor(threads) as pool:
            for entry in manifest.files:
                found = _read_digests(folder / entry.name, entry.size, manifest.chunk_bytes, pool)
                if wrong := [str(index) for index, pair in enumerate(zip(found, entry.chunks, strict=True)) if pair[0] != pair[1]]:
                    raise WeightsError(f"{folder / entry.name}: not the announced content (chunks {', '.join(wrong[:10])} of {len(entry.chunks)})")
    except OSError as error:
        raise WeightsError(f"{folder}: version {version} cannot be read ({error})") from error
    return manifest


def _read_digests(path: Path, size: int, chunk_bytes: int, pool: ThreadPoolExecutor) -> list[str]:
    """Of a file's chunks. They are read, not mapped: a file server's error would end the process there, and is an OSError here."""
    with path.open("rb") as file:
        return list(pool.map(lambda offset: digest_of(os.pread(file.fileno(), chunk_bytes, offset)), range(0, size, chunk_bytes)))


def _pieces(path: Path, size: int, chunk_bytes: int) -> Iterator[memoryview]:
    """The chunks of a file, mapped into memory."""
    if not size:
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        content = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)
    for offset in range(0, size, chunk_bytes):
        yield content[offset: offset + chunk_bytes]

"""The manifest of published weights: which files, how long, with which digests (BLAKE3). No torch.

A published version is a folder: config.json, *.safetensors in Hugging Face's format, and manifest.json. The digest of
manifest.json travels in the announcement, on the authenticated channel, so nothing forged or cut short is ever loaded.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from blake3 import blake3

from workers.messages.types import Version

MANIFEST = "manifest.json"


class WeightsError(RuntimeError):
    """Published weights that are missing, incomplete or not what was announced."""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its name, size in bytes, and BLAKE3 digest (hex)."""

    name: str
    size: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All files of one version."""

    version: Version
    files: list[FileEntry]


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's content, hex."""
    return blake3().update_mmap(path).hexdigest()


def make_manifest(folder: Path, version: Version) -> str:
    """Write the manifest of all files in `folder`; returns its digest."""
    files = [FileEntry(path.name, path.stat().st_size, digest_file(path)) for path in sorted(folder.iterdir())]
    content = msgspec.json.encode(Manifest(version, files))
    (folder / MANIFEST).write_bytes(content)
    return blake3(content).hexdigest()


def verify(folder: Path, version: Version, digest: str) -> Manifest:
    """Check that `folder` holds exactly what was announced. Raises `WeightsError` naming the first difference."""
    try:
        content = (folder / MANIFEST).read_bytes()
        if blake3(content).hexdigest() != digest:
            raise WeightsError(f"{folder}: the manifest is not the announced one")
        manifest = msgspec.json.decode(content, type=Manifest)
        if manifest.version != version:
            raise WeightsError(f"{folder}: holds version {manifest.version}, announced was {version}")
        surplus = {path.name for path in folder.iterdir()} - {entry.name for entry in manifest.files} - {MANIFEST}
        if surplus:
            raise WeightsError(f"{folder}: holds {', '.join(sorted(surplus))}, which was not announced")
        for entry in manifest.files:
            path = folder / entry.name
            if path.stat().st_size != entry.size or digest_file(path) != entry.digest:
                raise WeightsError(f"{path}: not the announced content")
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightsError(f"{folder}: version {version} cannot be read ({error})") from error
    return manifest

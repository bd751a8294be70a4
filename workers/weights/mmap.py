"""The files of one version, mapped into memory for reading."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from workers.weights.manifest import MANIFEST


class MappedFiles:
    """Read-only views of the files of a folder, which must have their full size; they outlast the removal of the files.

    Raises OSError where one cannot be read."""

    def __init__(self, folder: Path, names: Iterable[str] | None = None) -> None:
        """`names`: which files; all but the manifest without."""
        if names is None:
            names = [entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False) and entry.name != MANIFEST]
        self._content = {name: _map(folder / name) for name in names}

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return len(self._content[name])

    def view(self, name: str, offset: int, size: int) -> memoryview | None:
        """`size` bytes of a file, or None where it has none there."""
        content = self._content.get(name)
        if content is None or offset < 0 or size <= 0 or offset + size > len(content):
            return None
        return content[offset: offset + size]


def _map(path: Path) -> memoryview:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ)) if size else memoryview(b"")
    finally:
        os.close(descriptor)

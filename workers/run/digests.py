"""Digests of what lies in files."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3


def digest_of(content: bytes | bytearray | memoryview) -> str:
    """BLAKE3, hex."""
    return blake3(content).hexdigest()


def digest_file(path: Path) -> str:
    """BLAKE3 of a file's content, hex."""
    return blake3().update_mmap(path).hexdigest()

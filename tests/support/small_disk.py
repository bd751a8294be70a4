"""A real file system that is soon full. Only root can mount one: elsewhere what needs it is skipped, and says why."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` (as mount reads it: 2m) at `folder`, which is made."""
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)],
                                                       capture_output=True, text=True, check=False)
    if not mounted or mounted.returncode:
        pytest.skip(f"no small disk can be mounted here ({mounted.stderr.strip() if mounted else 'no mount command'})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)

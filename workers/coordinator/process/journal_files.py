"""The files of journals in a run folder: journal/EPOCH.PART, oldest first, and the code that they are replayed by."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

import workers
from workers.coordinator.recording import journal
from workers.run.folder import RunFolder

NAME = re.compile(r"\d{6,}\.\d{6,}")
DECIDES = "coordinator/**/*.py", "messages/**/*.py", "config/**/*.py", "run/own_pause.py"
"""The modules that decisions depend on."""


class Part(NamedTuple):
    """One file."""

    epoch: int
    number: int
    path: Path


def path_of(run: RunFolder, epoch: int, number: int) -> Path:
    """Where part `number` of an incarnation stands."""
    return run.journal / f"{epoch:06d}.{number:06d}"


def parts(run: RunFolder) -> list[Part]:
    """All parts, the oldest first; none where nothing was recorded."""
    found = [path for path in run.journal.iterdir() if NAME.fullmatch(path.name)] if run.journal.is_dir() else []
    return sorted(Part(int(path.name.partition(".")[0]), int(path.name.partition(".")[2]), path) for path in found)


def records_of(part: Part) -> Iterator[bytes]:
    """The encoded records of a part; none of one that a run that goes on has removed meanwhile. Raises `JournalError`, `OSError`."""
    try:
        content = part.path.read_bytes()
    except FileNotFoundError:
        return
    try:
        yield from journal.records(content)
    except journal.JournalError as error:
        raise journal.JournalError(f"{part.path}: {error}") from error


def code() -> str:
    """A digest of the modules that decide."""
    found = blake3()
    root = Path(workers.__path__[0])
    for pattern in DECIDES:
        for path in sorted(root.glob(pattern)):
            if "process" not in path.relative_to(root).parts:
                found.update(path.read_bytes())
    return f"headway {found.hexdigest()[:16]}"


def prune(run: RunFolder, limit: int) -> None:
    """Remove the oldest parts until all together have at most `limit` bytes; the newest one stays."""
    sizes = [(part.path, part.path.stat().st_size) for part in parts(run)]
    total = sum(size for _, size in sizes)
    for path, size in sizes[:-1]:
        if total <= limit:
            break
        path.unlink(missing_ok=True)
        total -= size

"""How files that several processes share are written and read: whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

MARK = 8
"""Bytes that stand for a line that was read."""


def is_full(error: BaseException) -> bool:
    """Whether it is that a disk, or what one may have of it, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomic(path: Path, content: bytes | Sequence[bytes | memoryview], mode: int = 0o600) -> None:
    """Write `path` so that readers see the old content or the new, never a part: temporary file, fsync, rename. `content`: perhaps in parts."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_once(path: Path, content: bytes, mode: int = 0o600) -> bool:
    """Write `path` unless it exists; atomic, and true for exactly one of several writers."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}.tmp")
    write_atomic(temporary, content, mode)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def append_whole(path: Path, content: bytes) -> None:
    """Append `content` for which there is one writer: all of it, or nothing. Raises OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        before = os.fstat(descriptor).st_size
        try:
            _write_all(descriptor, content)
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def write_from(path: Path, start: int, content: bytes) -> None:
    """Have `path`, for which there is one writer, end with `content` from byte `start` on, whatever an earlier try left there; it is made where
    `start` is 0. Raises OSError: FileNotFoundError where the beginning is gone."""
    descriptor = os.open(path, os.O_WRONLY | (0 if start else os.O_CREAT), 0o600)
    try:
        if os.fstat(descriptor).st_size < start:
            raise FileNotFoundError(errno.ENOENT, "its beginning is gone", str(path))
        os.ftruncate(descriptor, start)
        os.lseek(descriptor, start, os.SEEK_SET)
        _write_all(descriptor, content)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left):]


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a JSONL file; none if there is no file."""
    return GrowingLines(path).read()


class GrowingLines:
    """The lines of a JSONL file that grows, and is cut back where a run goes on from a checkpoint; `lines` are the newest `recent` of them.

    A cut is noticed by the last line that was read: no two lines of such a file are alike, as they say when they were written. Of older lines only
    eight bytes each are kept, by which those that stand there again are known. `marks`: those of the lines that another reader has had.
    """

    def __init__(self, path: Path, recent: int = 100, marks: bytes = b"") -> None:
        self.lines: list[dict] = []
        self._path, self._recent, self._end, self._last = path, recent, 0, b""
        self._marks = array("Q", marks)

    @property
    def marks(self) -> bytes:
        """Of all lines that were read, `MARK` bytes each."""
        return self._marks.tobytes()

    def read(self) -> list[dict]:
        """Read on; returns the lines that are new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._end - len(self._last))
                content = file.read()
        except FileNotFoundError:
            return []
        if content.startswith(self._last) and (self._last or not self._marks):
            return self._take(content[len(self._last):])
        known, self._marks, self.lines, self._end, self._last = self._marks, array("Q"), [], 0, b""  # cut back, and perhaps longer again by now
        content = self._path.read_bytes()
        marks = array("Q", map(_mark, complete_lines(content)))
        same = next((number for number, (old, new) in enumerate(zip(known, marks, strict=False)) if old != new), min(len(known), len(marks)))
        return self._take(content)[same:]

    def _take(self, content: bytes) -> list[dict]:
        complete = complete_lines(content)
        if not complete:
            return []
        self._end, self._last = self._end + sum(map(len, complete)), complete[-1]
        self._marks.extend(map(_mark, complete))
        new = [json.loads(line) for line in complete]
        self.lines = [*self.lines, *new][-self._recent:]
        return new


def _mark(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=MARK).digest(), "little")


def complete_lines(content: bytes) -> list[bytes]:
    """The lines, with their ends; what has none is left out."""
    return content[: content.rfind(b"\n") + 1].splitlines(keepends=True)

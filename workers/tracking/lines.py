"""What stands in a run's files and has not been told to a tracker yet.

    metrics.jsonl, evaluations.jsonl, heldout_samples.jsonl --what is new, or other than it was--> (file, record)

A mark of every line that was told is kept with the tracker's own id of the run in RUN/tracking/, so that whoever follows next goes on from there. A
new incarnation cuts the files off behind its checkpoint and writes on: from the first line that is not what it was, lines are told anew.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from workers.run.files import complete_lines, write_atomic
from workers.run.folder import RunFolder

MARK = 8
SAVE_EVERY = 100
"""Lines after which it is noted that they were told; who breaks off tells at most so many again."""


class Place(msgspec.Struct):
    """How far a tracker is. `remote`: its own id of the run, '' before it has one; `marks`: of each file's lines, `MARK` bytes each."""

    remote: str = ""
    marks: dict[str, bytes] = {}


class NewLines:
    """The lines of `run` for the tracker `name`. Raises OSError."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self._run, self._path = run, run.tracking / f"{name}.json"
        self.place = msgspec.json.decode(self._path.read_bytes(), type=Place) if self._path.exists() else Place()
        self._last: dict[str, tuple[int, bytes]] = {}

    def take(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, by file and in its order; one counts as told when the next is asked for."""
        told = itertools.count(1)
        for path in (self._run.metrics, self._run.evaluations, self._run.heldout_samples):
            for line in self._new(path):
                yield path.name, json.loads(line)
                self.place.marks[path.name] = self.place.marks.get(path.name, b"") + _mark(line)
                end, _ = self._last[path.name]
                self._last[path.name] = end + len(line), line
                if next(told) % SAVE_EVERY == 0:
                    self.save()
        if next(told) > 1:
            self.save()

    def save(self) -> None:
        """Note what was told."""
        write_atomic(self._path, msgspec.json.encode(self.place))

    def _new(self, path: Path) -> list[bytes]:
        """The lines behind the last one that was told; where that is not what it was, behind all that are."""
        if not path.exists():
            return []
        end, last = self._last.get(path.name, (0, b""))
        with path.open("rb") as file:
            if last:
                file.seek(end - len(last))
                if file.read(len(last)) == last:
                    return complete_lines(file.read())
                file.seek(0)
            lines = complete_lines(file.read())
        marks = self.place.marks.get(path.name, b"")
        known = [marks[start:start + MARK] for start in range(0, len(marks), MARK)]
        pairs = enumerate(zip(lines, known, strict=False))
        same = next((number for number, (line, mark) in pairs if _mark(line) != mark), min(len(lines), len(known)))
        self.place.marks[path.name] = marks[:MARK * same]
        self._last[path.name] = sum(map(len, lines[:same])), lines[same - 1] if same else b""
        return lines[same:]


def _mark(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=MARK).digest()

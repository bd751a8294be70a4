"""What stands in a run's files and has not been told to a tracker yet.

    metrics.jsonl, evaluations.jsonl, heldout_samples.jsonl --what is new, or other than it was--> (file, record)

A mark of every line that was told is kept with the tracker's own id of the run in RUN/tracking/, so that whoever follows next goes on from there. A
new incarnation cuts the files off behind its checkpoint and writes on: from the first line that is not what it was, lines are told anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from workers.run.files import MARK, GrowingLines, write_atomic
from workers.run.folder import RunFolder

SAVE_EVERY = 100
"""Lines after which it is noted that they were told; who breaks off tells at most so many again."""


class Place(msgspec.Struct):
    """How far a tracker is. `remote`: its own id of the run, '' before it has one; `marks`: of each file's lines (`GrowingLines.marks`)."""

    remote: str = ""
    marks: dict[str, bytes] = {}


class NewLines:
    """The lines of `run` for the tracker `name`; all of them where it keeps nothing itself (`anew`). Raises OSError."""

    def __init__(self, run: RunFolder, name: str, anew: bool = False) -> None:
        self._path = run.tracking / f"{name}.json"
        self.place = msgspec.json.decode(self._path.read_bytes(), type=Place) if self._path.exists() and not anew else Place()
        self._files = {path.name: GrowingLines(path, marks=self.place.marks.get(path.name, b""))
                       for path in (run.metrics, run.evaluations, run.heldout_samples)}
        self._waiting: dict[str, deque[dict[str, Any]]] = {file: deque() for file in self._files}

    def take(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, by file and in its order; one counts as told when the next is asked for."""
        told = 0
        for file, waiting in self._waiting.items():
            waiting.extend(self._files[file].read())
            while waiting:
                yield file, waiting[0]
                waiting.popleft()
                told += 1
                if told % SAVE_EVERY == 0:
                    self.save()
        if told % SAVE_EVERY:
            self.save()

    def save(self) -> None:
        """Note what was told."""
        self.place.marks = {file: lines.marks[:len(lines.marks) - MARK * len(self._waiting[file])] for file, lines in self._files.items()}
        write_atomic(self._path, msgspec.json.encode(self.place))

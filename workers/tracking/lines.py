"""What stands in a run's files and has not been told to a tracker yet. Pure but for reading.

    metrics.jsonl, evaluations.jsonl, heldout_samples.jsonl --lines from where it was--> (file, record)

Where it was is kept with the tracker's own id in RUN/tracking/, so that whoever follows next goes on from there. A new incarnation cuts the
files off behind its checkpoint; what it writes then is told anew, from the step that it began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from workers.run import incarnations
from workers.run.files import complete_lines, write_atomic
from workers.run.folder import RunFolder


class Place(msgspec.Struct):
    """How far a tracker is. `remote`: its own id of the run, '' before it has one; `epoch`: the incarnation; `ends`: bytes of each file."""

    remote: str = ""
    epoch: int = 0
    ends: dict[str, int] = {}


class NewLines:
    """The lines of `run` for the tracker `name`, once each."""

    def __init__(self, run: RunFolder, name: str) -> None:
        self._run, self._path = run, run.tracking / f"{name}.json"
        run.tracking.mkdir(mode=0o700, exist_ok=True)
        self.place = msgspec.json.decode(self._path.read_bytes(), type=Place) if self._path.exists() else Place()

    def take(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """What is new, by file and in its order; noted as told when the next one is asked for."""
        epoch = self._run.newest_epoch()
        if epoch != self.place.epoch:
            self._go_back(epoch)
        for path in (self._run.metrics, self._run.evaluations, self._run.heldout_samples):
            for line in complete_lines(_rest(path, self.place.ends.get(path.name, 0))):
                yield path.name, json.loads(line)
                self.place.ends[path.name] = self.place.ends.get(path.name, 0) + len(line)
        self.save()

    def save(self) -> None:
        """Keep where it is."""
        write_atomic(self._path, msgspec.json.encode(self.place))

    def _go_back(self, epoch: int) -> None:
        """To the step that the incarnation of `epoch` began with."""
        began = next((each.claim.step for each in incarnations.history(self._run) if each.claim.epoch == epoch), 0)
        for path in (self._run.metrics, self._run.evaluations, self._run.heldout_samples):
            kept = 0
            for line in complete_lines(_rest(path, 0)):
                if json.loads(line)["step"] > began:
                    break
                kept += len(line)
            self.place.ends[path.name] = min(self.place.ends.get(path.name, 0), kept)
        self.place.epoch = epoch


def _rest(path: Path, start: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(start)
        return file.read()

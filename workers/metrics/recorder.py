"""Writes what a run measures: metrics.jsonl and evaluations.jsonl, one JSON object a line, and the same to TensorBoard.

consumed.jsonl names the prompts that each step has consumed, heldout_samples.jsonl shows answers to held-out prompts. All files belong to
the state of the run: a checkpoint notes how long they were (`positions`), and whoever goes on from it cuts off what a lost lineage has
written after that.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from workers.run.folder import RunFolder

Value = float | int | str | None | list[int] | dict[str, int]


class Recorder:
    """Appends to the metrics of one run."""

    def __init__(self, run: RunFolder, positions: Mapping[str, int] | None = None, step: int = 0) -> None:
        """`positions`, `step`: what a checkpoint noted; without them the files are begun, over whatever an earlier start has left."""
        self._run = run
        self._files = {path.name: path for path in (run.metrics, run.evaluations, run.consumed, run.heldout_samples)}
        for name, path in self._files.items():
            if path.exists():
                os.truncate(path, min(path.stat().st_size, (positions or {}).get(name, 0)))
        self._events = EventFileWriter(str(run.tensorboard))
        # TensorBoard then drops what an earlier incarnation has written for later steps.
        self._events.add_event(Event(step=step + 1, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    def positions(self) -> dict[str, int]:
        """The length of each file, in bytes, which are on disk then."""
        return {name: _synced_size(path) for name, path in self._files.items()}

    def consumed(self, step: int, groups: list[int]) -> None:
        """Write which prompts the batch of `step` was made of."""
        with self._run.consumed.open("a") as file:
            file.write(json.dumps({"step": step, "groups": groups}) + "\n")

    def step(self, record: Mapping[str, Value]) -> None:
        """Write the record of one training step; it must have the key `step`."""
        self._write(self._run.metrics, "train", record)

    def evaluation(self, record: Mapping[str, Value]) -> None:
        """Write the record of one evaluation; it must have the key `step`."""
        self._write(self._run.evaluations, "evaluation", record)

    def samples(self, record: Mapping[str, object]) -> None:
        """Write what an evaluation has shown of its answers."""
        with self._run.heldout_samples.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _write(self, path: Path, prefix: str, record: Mapping[str, Value]) -> None:
        with path.open("a") as file:
            file.write(json.dumps({key: _finite(value) for key, value in record.items()}) + "\n")
        values = [Summary.Value(tag=f"{prefix}/{key}", simple_value=float(value)) for key, value in record.items()
                  if isinstance(value, int | float)]
        self._events.add_event(Event(step=int(record["step"]), wall_time=time.time(), summary=Summary(value=values)))  # type: ignore[arg-type]
        self._events.flush()

    def close(self) -> None:
        """Flush and close."""
        self._events.close()


def _finite(value: Value) -> Value:
    # JSON knows no NaN or infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _synced_size(path: Path) -> int:
    if not path.exists():
        return 0
    with path.open("rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size

"""Writes what a run measures: metrics.jsonl and evaluations.jsonl, one JSON object a line, and the same to TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from workers.rundir import RunFolder

Value = float | int | str | None | list[int] | dict[str, int]


class Recorder:
    """Appends to the metrics of one run."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._events = EventFileWriter(str(run.tensorboard))

    def step(self, record: Mapping[str, Value]) -> None:
        """Write the record of one training step; it must have the key `step`."""
        self._write(self._run.metrics, "train", record)

    def evaluation(self, record: Mapping[str, Value]) -> None:
        """Write the record of one evaluation; it must have the key `step`."""
        self._write(self._run.evaluations, "evaluation", record)

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


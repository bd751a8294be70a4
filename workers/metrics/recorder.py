"""Writes what a run measures: metrics.jsonl and evaluations.jsonl, one JSON object a line, and the same to TensorBoard.

consumed.jsonl names the prompts that each step has consumed, heldout_samples.jsonl shows answers to held-out prompts. All files belong to
the state of the run: a checkpoint notes how long they were (`positions`), and whoever goes on from it cuts off what a lost lineage has
written after that.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from workers.run.files import append_whole
from workers.run.folder import RunFolder

Value = float | int | str | None | list[int] | dict[str, int]


class Recorder:
    """Appends to the metrics of one run: what is recorded is held until `write` has brought it to its file."""

    def __init__(self, run: RunFolder, positions: Mapping[str, int] | None = None, step: int = 0) -> None:
        """`positions`, `step`: what a checkpoint noted; without them the files are begun, over whatever an earlier start has left."""
        self._run = run
        self._files = {path.name: path for path in (run.metrics, run.evaluations, run.consumed, run.heldout_samples)}
        for name, path in self._files.items():
            if path.exists():
                os.truncate(path, min(path.stat().st_size, (positions or {}).get(name, 0)))
        self._held: deque[tuple[Path, bytes, Event | None]] = deque()
        self._events: EventFileWriter | None = EventFileWriter(str(run.tensorboard))
        # TensorBoard then drops what an earlier incarnation has written for later steps.
        self._events.add_event(Event(step=step + 1, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START)))

    @property
    def num_held(self) -> int:
        """Lines that are not in their files yet."""
        return len(self._held)

    def positions(self) -> dict[str, int]:
        """The length of each file, in bytes, which are on disk then. Raises OSError where they do not hold everything."""
        self.write()
        return {name: _synced_size(path) for name, path in self._files.items()}

    def write(self) -> None:
        """Write what is held, line by line. Raises OSError; the rest stays held, and no line is written in part."""
        while self._held:
            path, line, event = self._held[0]
            append_whole(path, line)
            self._held.popleft()
            if event is not None:
                self._show(event)

    def consumed(self, step: int, groups: list[int]) -> None:
        """Record which prompts the batch of `step` was made of."""
        self._hold(self._run.consumed, {"step": step, "groups": groups})

    def step(self, record: Mapping[str, Value]) -> None:
        """Record one training step; it must have the key `step`."""
        self._measured(self._run.metrics, "train", record)

    def evaluation(self, record: Mapping[str, Value]) -> None:
        """Record one evaluation; it must have the key `step`."""
        self._measured(self._run.evaluations, "evaluation", record)

    def samples(self, record: Mapping[str, object]) -> None:
        """Record what an evaluation has shown of its answers."""
        self._hold(self._run.heldout_samples, record)

    def _hold(self, path: Path, record: Mapping[str, object], event: Event | None = None) -> None:
        self._held.append((path, json.dumps(record).encode() + b"\n", event))

    def _measured(self, path: Path, prefix: str, record: Mapping[str, Value]) -> None:
        values = [Summary.Value(tag=f"{prefix}/{key}", simple_value=float(value)) for key, value in record.items()
                  if isinstance(value, int | float)]
        event = Event(step=int(record["step"]), wall_time=time.time(), summary=Summary(value=values))  # type: ignore[arg-type]
        self._hold(path, {key: _finite(value) for key, value in record.items()}, event)

    def _show(self, event: Event) -> None:
        """To TensorBoard, whose writer does not outlive a full disk: the next event gets a new one, and this one is in the JSON lines."""
        try:
            self._events = self._events or EventFileWriter(str(self._run.tensorboard))
            self._events.add_event(event)
            self._events.flush()
        except OSError:
            self._events = None

    def close(self) -> None:
        """Write what is held, if that can be, and close."""
        with contextlib.suppress(OSError):
            self.write()
        with contextlib.suppress(OSError):
            if self._events is not None:
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

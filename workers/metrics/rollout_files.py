"""Keeps groups for people to read, as Parquet files in RUN/rollouts (docs/rollouts.md): a thread beside the coordinator's loop.

    a finished step's groups, held-out groups --queue--> rollout_table.py --> train-STEP.parquet, heldout-STEP.PART.parquet
                                                                               the oldest go once they come to rollout.keep_mb

Nobody depends on them: what cannot be written is dropped and said once, and so is what comes faster than it can be written.
"""

from __future__ import annotations

import os
import queue
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from workers.metrics.rollout_table import HELDOUT, TRAIN, Kept, Reader, table

MOST_WAITING = 64
"""Entries that wait to be written."""
PART_TOKENS = 1 << 20
"""So many held-out tokens are written as a part, before the evaluation has come to its end."""
LEAVE_S = 3.0
OWN = re.compile(rf"({TRAIN}|{HELDOUT})-\d{{8}}(\.\d{{3}})?\.parquet")


class RolloutFiles:
    """Files in `folder`, at most `most_bytes` of them; `model`: the folder of the tokenizer. Those of steps after `step` are of a lost lineage, and
    removed; None: a new run, which begins with none."""

    def __init__(self, folder: Path, model: Path, most_bytes: int, step: int | None) -> None:
        self._folder, self._model, self._most_bytes = folder, model, most_bytes
        self._reader: Reader | None = None
        self._waiting: queue.Queue[Sequence[Kept] | None] = queue.Queue(MOST_WAITING)
        self._heldout: list[dict[str, Any]] = []
        self._trouble = ""
        self._forget_after(step)
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def keep(self, groups: Sequence[Kept]) -> None:
        """Have these written: those of a step, or some of an evaluation; none: the evaluation is over."""
        try:
            self._waiting.put_nowait(groups)
        except queue.Full:
            self._say("they come faster than they can be written")

    def close(self) -> None:
        """Write what waits, for some seconds at most."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(LEAVE_S)

    def _run(self) -> None:
        while (groups := self._waiting.get()) is not None:
            self._attempt(groups)
        self._attempt(())

    def _attempt(self, groups: Sequence[Kept]) -> None:
        try:
            self._take(groups)
            self._trouble = ""
        except (OSError, pa.ArrowException) as error:
            self._heldout = []
            self._say(str(error))

    def _say(self, why: str) -> None:
        if not self._trouble:
            print(f"some rollouts are not kept ({self._folder}): {why}", flush=True)
        self._trouble = why

    def _take(self, groups: Sequence[Kept]) -> None:
        self._reader = self._reader or Reader(self._model)
        rows = [row for kept in groups for row in self._reader.rows(kept)]
        if rows and rows[0]["kind"] == TRAIN:
            self._write(f"{TRAIN}-{rows[0]['step']:08d}.parquet", rows)
            return
        if self._heldout and (not rows or rows[0]["step"] != self._heldout[0]["step"]):
            self._write_part()
        self._heldout += rows
        if sum(row["num_tokens"] for row in self._heldout) > PART_TOKENS:
            self._write_part()

    def _write_part(self) -> None:
        rows, self._heldout = self._heldout, []
        name = f"{HELDOUT}-{rows[0]['step']:08d}"
        there = len(list(self._folder.glob(f"{name}.*.parquet")))  # of this incarnation, or of one before it that left in the middle
        self._write(f"{name}.{there:03d}.parquet", rows)

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = self._folder / f".{name}.tmp"
        pq.write_table(table(rows), unfinished, compression="zstd")
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, self._folder / name)
        sizes = {path: path.stat().st_size for path in sorted(self._own(), key=_step_of)}
        for path in list(sizes)[:-1]:
            if sum(sizes.values()) <= self._most_bytes:
                break
            path.unlink()
            del sizes[path]

    def _own(self) -> list[Path]:
        return [path for path in self._folder.glob("*.parquet") if OWN.fullmatch(path.name)]  # a user's own may lie beside them

    def _forget_after(self, step: int | None) -> None:
        for path in self._own():
            if step is None or _step_of(path) > step:
                path.unlink(missing_ok=True)


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2][:8])

"""Keeps groups for people to read, as Parquet files in RUN/rollouts (docs/rollouts.md): a thread beside the coordinator's loop.

    a finished step's groups, held-out groups --queue--> rollout_table.py --> train-STEP.parquet, heldout-STEP.PART.parquet
                                                                               the oldest go once they come to rollout.keep_mb

Nobody depends on them: what cannot be written is dropped and said once, and so is what comes faster than it can be written.
"""

from __future__ import annotations

import itertools
import os
import queue
import re
import threading
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from workers.metrics.rollout_table import HELDOUT, TRAIN, Kept, Reader, table
from workers.run.files import sync

MOST_WAITING = 64
"""Entries that wait to be written."""
PART_TOKENS = 1 << 20
"""So many held-out tokens are written as a part, before the evaluation has come to its end."""
LEAVE_S = 3.0
OWN = re.compile(rf"({TRAIN}|{HELDOUT})-(\d{{8}})(\.\d{{3}})?\.parquet")
"""What else lies there is the user's own."""


class RolloutFiles:
    """Files in `folder`, at most `most_bytes` of them; `model`: the folder of the tokenizer. Those of steps after `step` are of a lost lineage, and
    removed; None: a new run, which begins with none. `judged`: by step, the held-out groups that stay of an evaluation that goes on or is made again:
    what else there is of it comes once more."""

    def __init__(self, folder: Path, model: Path, most_bytes: int, step: int | None, judged: Mapping[int, Set[str]] = MappingProxyType({})) -> None:
        self._folder, self._model, self._most_bytes = folder, model, most_bytes
        self._reader: Reader | None = None
        self._waiting: queue.Queue[Sequence[Kept] | None] = queue.Queue(MOST_WAITING)
        self._heldout: list[dict[str, Any]] = []
        self._trouble = ""
        self._sizes = {path: path.stat().st_size for path in folder.glob("*.parquet") if OWN.fullmatch(path.name)}
        for path in [path for path in self._sizes if step is None or _step_of(path) > step]:
            self._remove(path)
        self._thread = threading.Thread(target=self._run, args=(judged,), name="rollouts", daemon=True)
        self._thread.start()

    def keep(self, groups: Sequence[Kept]) -> None:
        """Have these written: those of a step, or some of an evaluation; none: all there is of it, as it is over, or a checkpoint is made."""
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

    def _run(self, judged: Mapping[int, Set[str]]) -> None:
        for path in [path for path in self._sizes if path.name.startswith(HELDOUT) and _step_of(path) in judged]:
            self._reduce(path, judged[_step_of(path)])
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
        names = (f"{HELDOUT}-{rows[0]['step']:08d}.{number:03d}.parquet" for number in itertools.count())
        self._write(next(name for name in names if self._folder / name not in self._sizes), rows)  # one before may have left in the middle

    def _reduce(self, path: Path, groups: Set[str]) -> None:
        try:
            found = pq.read_table(path)
            rest = found.filter(pc.is_in(found["group"], pa.array(sorted(groups), pa.string())))
            if rest.num_rows == 0:
                self._remove(path)
            elif rest.num_rows < found.num_rows:
                self._replace(path, rest)
        except (OSError, pa.ArrowException) as error:
            self._say(f"{path.name} may hold groups twice: {error}")

    def _replace(self, path: Path, rows: pa.Table) -> None:
        unfinished = path.with_name(f".{path.name}.tmp")
        pq.write_table(rows, unfinished, compression="zstd")
        sync(unfinished)
        os.replace(unfinished, path)
        self._sizes[path] = path.stat().st_size

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._replace(self._folder / name, table(rows))
        while sum(self._sizes.values()) > self._most_bytes and len(self._sizes) > 1:
            self._remove(min(self._sizes, key=_step_of))

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        del self._sizes[path]


def _step_of(path: Path) -> int:
    return int(path.name.partition("-")[2][:8])

"""Writes the coordinator's journal while it works: every input is only put aside as it happens; a thread encodes and writes them every FLUSH_S, as
many together as there are: that takes less than half of what each alone would.

    note --> pending --every FLUSH_S, in a thread--> journal/EPOCH.PART --full--> another part, with the state at its beginning

What costs the loop anything is the digest of the state (a Point): at finished steps and once a second, as long as all of them together have taken
less than SHARE of this process's time. Where nothing can be written, recording stops, `trouble` says so, and another part is tried every RETRY_S.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from workers.coordinator.core import Coordinator
from workers.coordinator.process import journal_files
from workers.coordinator.recording import journal
from workers.coordinator.recording.frozen_state import StateError, digests, freeze
from workers.coordinator.recording.inputs import AnyInput, Arrived, Outcome
from workers.coordinator.recording.journal import ExampleSizes, Point, Record, Witness
from workers.messages.from_worker import StepFinished
from workers.run.files import append_whole
from workers.run.folder import RunFolder

FLUSH_S = 0.7
"""With the tick of the loop less than a second, which is all that a SIGKILL may lose."""
POINT_S = 1.0
SHARE, GRANTED_S = 0.001, 0.005
"""Of the process's time that digests may take, and seconds that they may from the beginning."""
RETRY_S = 10.0
STUCK_S = 10.0
"""So long a write may take before what is pending is given up: it holds groups with their tokens."""
PARTS = 8
"""Parts that are kept."""

Noted = tuple[AnyInput, Outcome | None, list[ExampleSizes]]


class FlightRecorder:
    """Of one incarnation. `clock`: its own seconds, those since 1970, and since the run began. `examples`: of a supervised run. `trouble`: why
    nothing is recorded, '' while it is."""

    def __init__(self, run: RunFolder, core: Coordinator, clock: Callable[[], tuple[float, float, float]], examples: Witness | None = None) -> None:
        self._run, self._core, self._clock, self._examples = run, core, clock, examples
        self._limit = core.config.run.journal_mb << 20
        self._code, self._config = journal_files.code(), run.config.read_bytes()
        self._pending: list[Noted | Record] = []
        self._number, self._part, self._size, self._open = 0, -1, 0, False
        self._writing: asyncio.Task[None] | None = None
        self._written = self._pointed = -POINT_S
        self._spent_s = 0.0
        self.trouble = ""

    def note(self, given: AnyInput, outcome: Outcome | None) -> None:
        """Put an input aside; `outcome`: None where it has raised an exception."""
        self._number += 1
        examples = self._examples.take() if self._examples is not None else []
        if self._open:
            self._pending.append((given, outcome, examples))
            if isinstance(given, Arrived) and isinstance(given.message, StepFinished) and outcome is not None:
                self._point(given.now)

    def look(self, now: float) -> None:
        """Begin to write what is pending, where it is time."""
        waited = now - self._written
        if not self._limit or waited < (RETRY_S if self.trouble else FLUSH_S):
            return
        if self._writing is None or self._writing.done():
            if now - self._pointed >= POINT_S:
                self._point(now)
            self._begin_write(now)
        elif waited > STUCK_S and self._open:
            self._stop(f"the run folder has not answered for {waited:.0f} s")

    async def flush(self) -> None:
        """Write what has been noted so far: what a checkpoint holds is to stand here too."""
        for _ in range(2):
            if self._writing is not None:
                await asyncio.wait([self._writing], timeout=STUCK_S)
                if not self._writing.done():
                    return
            if self._open and self._pending:
                self._begin_write(self._written)

    def begin(self, now: float) -> None:
        """Record from here on."""
        if self._limit:
            self._begin_write(now)

    def _begin_write(self, now: float) -> None:
        files = [(self._path, self._pending)] if self._pending else []
        self._pending, self._written = [], now
        begins = not self._open or self._size > self._limit // PARTS
        if begins:
            try:
                beginning = journal.start(self._core, self._code, self._config, self._part + 1, self._number + 1, *self._clock())
            except StateError as error:
                self._stop(str(error))
                return
            self._part, self._size, self._open = self._part + 1, 0, True
            files.append((self._path, [beginning]))
        self._writing = asyncio.create_task(self._write(files, begins)) if files else None

    @property
    def _path(self) -> Path:
        return journal_files.path_of(self._run, self._core.epoch, self._part)

    async def _write(self, files: list[tuple[Path, list[Noted | Record]]], begins: bool) -> None:
        try:
            await asyncio.to_thread(self._append, files, begins)
        except (OSError, TypeError, ValueError) as error:  # of the disk, or of something that cannot be written: no reason to end a run
            self._stop(f"the journal cannot be written: {error}")
        else:
            self.trouble = "" if self._open else self.trouble

    def _append(self, files: list[tuple[Path, list[Noted | Record]]], begins: bool) -> None:
        if begins:
            self._run.journal.mkdir(mode=0o700, exist_ok=True)
        for path, noted in files:
            content = journal.frame([journal.entry(*one) if type(one) is tuple else one for one in noted])  # type: ignore[misc]
            try:
                append_whole(path, content)
            except OSError:
                if begins and path == files[-1][0]:
                    path.unlink(missing_ok=True)  # nothing stands there: no room is taken
                raise
            self._size += len(content)
        if begins:
            journal_files.prune(self._run, self._limit)

    def _point(self, now: float) -> None:
        if not self._open or self._spent_s > GRANTED_S + SHARE * time.process_time():
            return
        began, self._pointed = time.thread_time(), now
        try:
            self._pending.append(Point(self._number, *self._clock()[1:], digests(freeze(self._core))))
        except StateError as error:
            self._stop(str(error))
        self._spent_s += time.thread_time() - began

    def _stop(self, trouble: str) -> None:
        """Until another part can be begun. What was not written is given up."""
        if not self.trouble:
            print(f"nothing is recorded for headway replay any more: {trouble}", flush=True)
        self.trouble, self._open, self._pending = trouble, False, []

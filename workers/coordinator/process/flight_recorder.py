"""Writes the coordinator's journal while it works: every input is only put aside as it happens; a thread encodes and writes them every FLUSH_S, as
many together as there are: that takes less than half of what each alone would.

    note --> pending --every FLUSH_S, in a thread--> journal/EPOCH.PART --full--> another part, with the state at its beginning

What costs the loop anything is the digest of the state (a Point): at finished steps and once a second, as long as all of them together have taken
less than SHARE of this process's time. On a full disk what is to be written is kept, up to BACKLOG_BYTES. Beyond that, or where the run folder does
not answer, recording stops, and another part is tried every RETRY_S. `trouble` says so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from workers.coordinator.core import Coordinator
from workers.coordinator.process import journal_files
from workers.coordinator.recording import journal
from workers.coordinator.recording.frozen_state import StateError, digests, freeze
from workers.coordinator.recording.inputs import AnyInput, Arrived, Outcome
from workers.coordinator.recording.journal import ExampleSizes, Point, Record, Witness
from workers.messages.from_worker import StepFinished
from workers.run.files import is_full, write_from
from workers.run.folder import RunFolder

FLUSH_S = 0.7
"""With the tick of the loop less than a second, which is all that a SIGKILL may lose."""
POINT_S = 1.0
SHARE, GRANTED_S = 0.001, 0.005
"""Of the process's time that digests may take, and seconds that they may from the beginning."""
RETRY_S = 10.0
STUCK_S = 10.0
"""So long a write may take before what is pending is given up: it holds groups with their tokens."""
BACKLOG_BYTES = 8 << 20
"""What cannot be written is kept without its tokens, as it is to stand in the files, until there is more than this of it."""
PARTS = 8
"""Parts that are kept."""

Noted = tuple[AnyInput, Outcome | None, list[ExampleSizes]]


class FlightRecorder:
    """Of one incarnation. `clock`: its own seconds, those since 1970, and since the run began. `examples`: of a supervised run. `trouble`: why
    nothing gets to the disk, '' while it does."""

    def __init__(self, run: RunFolder, core: Coordinator, clock: Callable[[], tuple[float, float, float]], examples: Witness | None = None) -> None:
        self._run, self._core, self._clock, self._examples = run, core, clock, examples
        self._limit = core.config.run.journal_mb << 20
        self._code, self._config = journal_files.code(), run.config.read_bytes()
        self._pending: list[Noted | Record] = []
        self._backlog: deque[tuple[Path, bytes, bool]] = deque()  # for the thread that writes; whether the part begins with it
        self._number, self._part, self._open = 0, -1, False
        self._size = 0  # of the newest part, with what is kept of it
        self._on_disk = 0  # of the part that is being written
        self._writing: asyncio.Task[None] | None = None
        self._written = self._pointed = -POINT_S
        self._spent_s = 0.0
        self.trouble = ""
        self._said: set[str] = set()

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
        if not self._limit or waited < (RETRY_S if self.trouble and not self._open else FLUSH_S):
            return
        if self._writing is None or self._writing.done():
            if now - self._pointed >= POINT_S:
                self._point(now)
            self._begin_write(now)
        elif waited > STUCK_S and self._open:
            self._stop(f"the run folder has not answered for {waited:.0f} s")

    async def flush(self) -> None:
        """Write what has been noted so far: what a checkpoint holds is to stand here too."""
        if await self._settled() and self._open and (self._pending or self._backlog):
            self._begin_write(self._written)
            await self._settled()

    async def _settled(self) -> bool:
        """Whether nothing is being written any more, after STUCK_S."""
        while (writing := self._writing) is not None and not writing.done():  # meanwhile another may be begun
            await asyncio.wait([writing], timeout=STUCK_S)
            if not writing.done():
                return False
        return True

    def begin(self, now: float) -> None:
        """Record from here on."""
        if self._limit:
            self._begin_write(now)

    def _begin_write(self, now: float) -> None:
        files: list[tuple[Path, list[Noted | Record], bool]] = [(self._path, self._pending, False)] if self._pending else []
        self._pending, self._written = [], now
        begins = not self._open or self._size > self._limit // PARTS
        if begins:
            try:
                beginning = journal.start(self._core, self._code, self._config, self._part + 1, self._number + 1, *self._clock())
            except StateError as error:
                self._stop(str(error))
                return
            self._part, self._open = self._part + 1, True
            files.append((self._path, [beginning], True))
        self._writing = asyncio.create_task(self._write(files)) if files or self._backlog else None

    @property
    def _most_kept(self) -> int:
        return min(BACKLOG_BYTES, self._limit // PARTS)  # bytes: no more than a part

    @property
    def _path(self) -> Path:
        return journal_files.path_of(self._run, self._core.epoch, self._part)

    async def _write(self, files: list[tuple[Path, list[Noted | Record], bool]]) -> None:
        try:
            await asyncio.to_thread(self._append, files)
        except (OSError, TypeError, ValueError) as error:  # of the disk, or of something that cannot be written: no reason to end a run
            trouble = f"the journal cannot be written: {error}"
            kept = sum(len(content) for _, content, _ in self._backlog)
            if is_full(error) and self._open and kept <= self._most_kept:
                self._keep(trouble)
            else:
                self._backlog.clear()
                self._stop(trouble)
        else:
            if self._open:
                self.trouble = ""
                self._said.clear()

    def _append(self, files: list[tuple[Path, list[Noted | Record], bool]]) -> None:
        for path, noted, begins in files:
            content = journal.frame([journal.entry(*one) if type(one) is tuple else one for one in noted])  # type: ignore[misc]
            self._backlog.append((path, content, begins))
            self._size = len(content) + (0 if begins else self._size)
        while self._backlog:
            path, content, begins = self._backlog[0]
            if begins:
                self._run.journal.mkdir(mode=0o700, exist_ok=True)
                self._on_disk = 0
            try:
                write_from(path, self._on_disk, content)
            except OSError:
                if begins:
                    path.unlink(missing_ok=True)  # nothing stands there: no room is taken
                raise
            self._backlog.popleft()
            self._on_disk += len(content)
            if begins:
                journal_files.prune(self._run, self._limit)

    def _point(self, now: float) -> None:
        if not self._open or self._spent_s > GRANTED_S + SHARE * time.process_time():
            return
        began, self._pointed = time.thread_time(), now
        try:
            self._pending.append(Point(self._number, digests(freeze(self._core))))
        except StateError as error:
            self._stop(str(error))
        self._spent_s += time.thread_time() - began

    def _keep(self, trouble: str) -> None:
        """In memory, until it can be written."""
        self.trouble = f"{trouble}; kept in memory since then, {self._most_kept / 2**20:.3g} MB at most"
        self._say("what headway replay needs cannot be written", trouble)

    def _stop(self, trouble: str) -> None:
        """Until another part can be begun. What was not written is given up."""
        self.trouble, self._open, self._pending = trouble, False, []
        self._say("nothing is recorded for headway replay any more", trouble)

    def _say(self, what: str, trouble: str) -> None:
        """Once, until all is well again."""
        if what not in self._said:
            print(f"{what}: {trouble}", flush=True)
        self._said.add(what)

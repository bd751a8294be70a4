"""Work that goes on beside training, in a thread of its own: one piece at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine

Files = dict[str, tuple[int, str]]


LEAVE_S = 1.0
"""How long a rank that leaves waits for work that nobody needs any more: less than GRACE_S of coordinator_link/client.py."""


class Work(NamedTuple):
    """A piece of work, the thread that does it and what becomes of it."""

    thread: threading.Thread
    outcome: Future[None]


class Background:
    """At most one piece of work; how it ends is learnt from `end`. `ended` is called in its thread after each.

    A process that leaves in order waits for its threads, with `end` or `abandon`: one that is inside of torch when the interpreter is
    taken down aborts the process.
    """

    def __init__(self, name: str, ended: Callable[[], None] = lambda: None) -> None:
        self._name, self._ended = name, ended
        self._work: Work | None = None

    @property
    def busy(self) -> bool:
        """Whether work goes on."""
        return self._work is not None and not self._work.outcome.done()

    def start(self, work: Callable[[], None]) -> None:
        """Begin `work`; how the one before has ended must be known."""
        assert self._work is None
        outcome: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 -- raised again where the end is asked for
                outcome.set_exception(error)
            else:
                outcome.set_result(None)
            self._ended()

        self._work = Work(threading.Thread(target=run, name=self._name, daemon=True), outcome)
        self._work.thread.start()

    def end(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the work, for `timeout_s` at most; false if it still goes on. Raises, once, what the work has raised."""
        if self._work is None:
            return True
        with contextlib.suppress(TimeoutError):
            self._work.outcome.exception(timeout_s)
        if not self._work.outcome.done():
            return False
        work, self._work = self._work, None
        work.thread.join()
        work.outcome.result()
        return True

    def abandon(self, timeout_s: float) -> bool:
        """Wait for the end of the work, for `timeout_s` at most; how it ends is asked no more. Returns whether it has ended."""
        work, self._work = self._work, None
        if work is not None:
            work.thread.join(timeout_s)
        return work is None or work.outcome.done()


class PartSaver:
    """Saves this rank's part of the trainer's state: `background`: while training goes on. All ranks call `save` together."""

    def __init__(self, engine: MegatronEngine, background: bool) -> None:
        self._engine, self._in_background = engine, background
        self.writing = Background("checkpoint")

    def save(self, folder: Path, final: bool, then: Callable[[Files], None]) -> None:
        """Save into `folder`, and call `then` with the files written (all on rank 0, else none) when they are on disk; a `final` one at once.

        The part before it must have been written. Raises CheckpointError on all ranks where saving cannot begin, or fails at once.
        """
        if final or not self._in_background:
            then(self._engine.save_state(folder))
            return
        saving = self._engine.begin_save(folder)
        self.writing.start(lambda: then(saving.write()))

    def follow(self, folder: Path, final: bool) -> None:
        """`save` on any other rank: rank 0 learns of what fails here, and decides."""
        with contextlib.suppress(CheckpointError):
            self.writing.end()
        with contextlib.suppress(CheckpointError):
            self.save(folder, final, lambda files: None)

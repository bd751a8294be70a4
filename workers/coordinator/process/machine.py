"""The state machine as the coordinator's process drives it: one input after the other, and what follows waits here until it is taken."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.coordinator.core import Coordinator
from workers.coordinator.recording.inputs import AnyInput, Ended, Outcome, Sent, advance
from workers.coordinator.training.step_records import Record
from workers.messages.from_worker import CheckpointRequest

Note = Callable[[AnyInput, Outcome | None], None]
"""Hears of every input and what followed; None: it has raised an exception."""


class Machine:
    """`core` may be read by anyone; nothing but `do` changes it. `records`: for the metrics; `checkpoint`: who waits for
    this process's part of one."""

    def __init__(self, core: Coordinator, note: Note | None = None) -> None:
        self.core, self.note = core, note
        self.checkpoint: tuple[bytes, CheckpointRequest] | None = None
        self._sending: Sent = []
        self._notices: list[str] = []
        self.records: list[Record] = []

    def do(self, given: AnyInput) -> Outcome:
        """Let it happen."""
        outcome = None
        try:
            outcome = advance(self.core, given)
        finally:
            if self.note is not None:
                self.note(given, outcome)
        self._sending += outcome.sent
        self._notices += outcome.notices
        self.records += outcome.records
        self.checkpoint = outcome.checkpoint or self.checkpoint
        return outcome

    def end(self, cause: str) -> None:
        """End the run."""
        self.do(Ended(time.monotonic(), cause))

    def take_sending(self) -> Sent:
        """Messages to be sent, and whom they are for."""
        sending, self._sending = self._sending, []
        return sending

    def take_notices(self) -> list[str]:
        """Lines for the log."""
        notices, self._notices = self._notices, []
        return notices

    def take_records(self) -> list[Record]:
        """What is to be written to the metrics."""
        records, self.records = self.records, []
        return records

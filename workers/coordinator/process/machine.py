"""The state machine as the coordinator's process drives it: one input after the other, and what follows waits here until it is taken."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.coordinator.core import LOOK_S, Coordinator
from workers.coordinator.recording.inputs import AnyInput, Ended, Outcome, Sent, Ticked, advance
from workers.coordinator.training.step_records import HeldoutGroup, Record
from workers.messages.from_worker import CheckpointRequest
from workers.run.own_pause import own_pause

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
        self._heldout: list[HeldoutGroup] = []

    def do(self, given: AnyInput) -> Outcome:
        """Let it happen. After a pause of this process itself the time passes first: what waited here meanwhile is not as late as it looks."""
        if not isinstance(given, Ticked) and own_pause(given.now - self.core.ticked, LOOK_S):
            self.do(Ticked(given.now))
        outcome = None
        try:
            outcome = advance(self.core, given)
        finally:
            if self.note is not None:
                self.note(given, outcome)
        self._sending += outcome.sent
        self._notices += outcome.notices
        for record in outcome.records:
            if isinstance(record, HeldoutGroup):
                self._heldout.append(record)
            else:
                self.records.append(record)
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

    def take_heldout(self) -> list[HeldoutGroup]:
        """Held-out groups to be read by people: many, one by one, and no part of what must be written."""
        heldout, self._heldout = self._heldout, []
        return heldout

"""Whether a run was submitted whole. A launcher that dies between two submissions leaves a run that nobody completes.

Every element looks: a record in jobs.json that is not complete, and has not changed for `PATIENCE_S`, ends the run. Only the first
submission of a run, and of one that is resumed, is all or nothing: what is added while it goes on leaves the record complete.
"""

from __future__ import annotations

import time

from workers.run.folder import RunFolder

PATIENCE_S = 120.0
CUT_SHORT = ("the launcher died while it was submitting the run (jobs.json is not complete). What was submitted ends now; "
             "start it anew with the launcher")


class SubmissionWatch:
    """Looks at jobs.json until it is complete."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._seen: dict = {}
        self._since = time.monotonic()

    def is_whole(self) -> bool:
        """True once the run is submitted whole, or has ended; ends it after `PATIENCE_S` without a change."""
        record = self._run.submission()
        if record.get("complete") or self._run.ended() is not None:
            return True
        if record != self._seen:
            self._seen, self._since = record, time.monotonic()
        elif time.monotonic() - self._since > PATIENCE_S:
            self._run.end(CUT_SHORT, "an element")
        return False

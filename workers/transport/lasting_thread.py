"""A thread that a server lives by: whatever ends it is said, and it begins again."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

PAUSE_S = 0.1
MAX_PAUSE_S, MAX_DOUBLINGS = 5.0, 6


class LastingThread:
    """Runs `work` until that returns. Where it raises, that is said and counted, and `work` is called again, the later the more often it was."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.num_failures = 0
        self._name, self._work = name, work
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            try:
                return self._work()
            except Exception:  # noqa: BLE001 -- a server without its thread serves nobody: it is said and counted, and begins again
                self.num_failures += 1
                print(f"warning: the thread of the {self._name} has failed ({self.num_failures} so far) and begins again:\n"
                      f"{traceback.format_exc()}", flush=True)
                time.sleep(min(MAX_PAUSE_S, PAUSE_S * 2 ** min(self.num_failures, MAX_DOUBLINGS)))

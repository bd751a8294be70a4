"""What SLURM tells a job by signals: set down by a handler, acted on where it is safe."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable


class Signals:
    """Notes the first SIGUSR2 (time limit or preemption is near) or SIGTERM (the end is near), and when it came.

    To be made in the main thread. Only that is done inside the handler, and `on_signal`, which must be reentrant.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.at = 0.0
        self.on_signal: Callable[[], None] = lambda: None
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, _: object) -> None:
        if self.received is None:
            self.received, self.at = signal.Signals(number), time.time()
        self.on_signal()

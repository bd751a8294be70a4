"""The coordinator's process, which rank 0 of training starts and owns."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from workers.run.folder import RunFolder
from workers.run.processes import PARENT_DIED, describe_exit

JOIN_S = 35.0
LOG_LINES = 15


class CoordinatorProcess:
    """Started by the constructor; `checkpoint` is the folder to go on from. Raises `OSError`."""

    def __init__(self, run: RunFolder, epoch: int, checkpoint: Path | None) -> None:
        self._log = run.jobs / "coordinator.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workers.coordinator.process.main", str(run.path), str(os.getpid()), str(epoch),
                 *([str(checkpoint)] if checkpoint else [])],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def watch(self, ended: Callable[[int], None]) -> None:
        """Tell its exit status, from a thread of its own, once it has ended."""
        threading.Thread(target=lambda: ended(self._process.wait()), name="coordinator-watch", daemon=True).start()

    def describe_end(self, status: int) -> str:
        """How it ended, and what it logged last."""
        try:
            log = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        except OSError as error:  # the run folder may be what it died of
            log = [f"its log cannot be read: {error}"]
        return "\n  ".join([f"the coordinator (process {self._process.pid}) {describe_exit(status)}", *log])

    def abandon(self) -> None:
        """Have it end as it does when its parent is gone."""
        self._process.send_signal(PARENT_DIED)

    def close(self) -> int:
        """Wait for its end, at most `JOIN_S` seconds; returns its exit status."""
        try:
            return self._process.wait(JOIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

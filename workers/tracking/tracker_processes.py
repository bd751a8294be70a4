"""The processes that tell trackers of a run, which rank 0 of training starts and owns."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from workers.config import TrackingConfig
from workers.run.folder import RunFolder
from workers.run.processes import describe_exit

FINISH_S = 30.0


class TrackerProcesses:
    """Started by the constructor, one for each tracker; their words stand in jobs/tracking-NAME.log."""

    def __init__(self, run: RunFolder, config: TrackingConfig) -> None:
        self._run = run
        self._processes: dict[str, subprocess.Popen] = {}
        # Told to end before it can listen, a process finds the signal as soon as it does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        for tracker in config.to:
            with (run.jobs / f"tracking-{tracker.value}.log").open("ab") as log:
                self._processes[tracker.value] = subprocess.Popen(
                    [sys.executable, "-m", "workers.tracking.run_follower", str(run.path), tracker.value, str(os.getpid())],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def close(self) -> None:
        """Have them tell the rest, at most `FINISH_S` seconds together; says which could not, and what to do."""
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + FINISH_S
        for name, process in self._processes.items():
            try:
                status = process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                print(f"tracking: {name}'s process {describe_exit(status)} and has not told everything (jobs/tracking-{name}.log). What is missing: "
                      f"python -m workers.tracking.run_follower {self._run.path} {name}", flush=True)

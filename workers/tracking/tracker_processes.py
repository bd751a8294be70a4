"""The processes that tell trackers of a run, which rank 0 of training starts and owns."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from workers.config import Tracker, TrackingConfig
from workers.run.folder import RunFolder
from workers.run.processes import PARENT_DIED, describe_exit

FINISH_S = 30.0
KILLED_S = 5.0


class TrackerProcesses:
    """Started by the constructor, one for each tracker, for the incarnation `epoch`; their words stand in jobs/tracking-NAME.log."""

    def __init__(self, run: RunFolder, config: TrackingConfig, epoch: int) -> None:
        self._run = run
        self._processes: dict[str, subprocess.Popen] = {}
        for tracker in config.to:
            try:
                self._processes[tracker.value] = self._start(tracker.value, epoch)
            except OSError as error:
                print(f"tracking: {tracker.value} is told nothing by this job: its process cannot be started ({error})", flush=True)

    def _start(self, name: str, epoch: int) -> subprocess.Popen:
        # Told to end before it can listen, a process finds the signal as soon as it does.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [PARENT_DIED])
        try:
            with (self._run.jobs / f"tracking-{name}.log").open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-m", "workers.tracking.run_follower", str(self._run.path), name, str(os.getpid()), str(epoch)],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def look(self) -> None:
        """Say, once of each, which have ended before they were told to. From one thread at a time."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                del self._processes[name]
                self._tell_ended(name, process)

    def close(self) -> None:
        """Have them tell the rest, at most `FINISH_S` seconds together; says which could not, and what to do."""
        for process in self._processes.values():
            process.send_signal(PARENT_DIED)
        deadline = time.monotonic() + FINISH_S
        for name, process in self._processes.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk
                    process.wait(KILLED_S)
            if process.returncode != 0:
                self._tell_ended(name, process)

    def _tell_ended(self, name: str, process: subprocess.Popen) -> None:
        how = describe_exit(process.returncode) if process.returncode is not None else "does not end"
        # Prometheus is shown what is now, and from here only.
        remedy = f"What is missing: python -m workers.tracking.run_follower {self._run.path} {name}"
        if name == Tracker.prometheus.value:
            remedy = "The run's next job tries again; where the port is taken, choose another tracking.port, or 0"
        print(f"tracking: {name}'s process {how} and has not told everything (jobs/tracking-{name}.log). {remedy}", flush=True)

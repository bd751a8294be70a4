"""The ranks of a run on one machine: rank 0 is the training job, the others are its children. (On SLURM srun starts them all.)

    rank 0   --starts--> python -m workers.trainer.local_ranks RUN RANK SIZE EPOCH PARENT --> meets rank 0 and does what it says (follower.py)
    rank 0   <--exit status-- a thread for each of them: the first that fails ends the run, and its last words are the cause
    rank 0 dies, however it may be: the kernel kills the others (PR_SET_PDEATHSIG)

Ranks meet at `transport.interface`, by default the loopback interface. What they print is in jobs/rankN.log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from workers.config import load
from workers.run.folder import RunFolder
from workers.run.processes import describe_exit, end_with_parent, enlist
from workers.slurm.job import Place
from workers.slurm.signals import Signals

JOIN_S = 20.0
LAST_WORDS = 15


class LocalGang:
    """Starts ranks 1 to `size` - 1, from a thread that stays. `failed` is told from another one why the first of them failed."""

    def __init__(self, run: RunFolder, size: int, epoch: int, failed: Callable[[str], None]) -> None:
        self.place = place(0, size, epoch)
        self._run, self._failed = run, failed
        self._failure = ""
        self._one_failed, self._lock = threading.Event(), threading.Lock()
        self._others = [self._start(rank, size, epoch) for rank in range(1, size)]
        for rank, process in enumerate(self._others, 1):
            threading.Thread(target=self._watch, args=(rank, process), name=f"rank-{rank}-watch", daemon=True).start()

    def first_failure(self, patience_s: float) -> str:
        """Why the first rank failed, '' if none does within `patience_s`. Its end breaks connections before it can be noticed otherwise."""
        self._one_failed.wait(patience_s)
        return self._failure

    def join(self) -> None:
        """Wait until all have left, as they do when they have been told to; what is left after `JOIN_S` is killed."""
        deadline = time.monotonic() + JOIN_S
        for process in self._others:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, rank: int, size: int, epoch: int) -> subprocess.Popen:
        with self._log(rank).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-u", "-m", "workers.trainer.local_ranks", str(self._run.path), str(rank), str(size), str(epoch), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _watch(self, rank: int, process: subprocess.Popen) -> None:
        if (status := process.wait()) == 0:
            return
        with self._lock:
            if self._failure:
                return
            words = self._log(rank).read_text(errors="replace").splitlines()[-LAST_WORDS:]
            self._failure = "\n  ".join([f"training rank {rank} (process {process.pid}) {describe_exit(status)}", *words])
        self._one_failed.set()
        self._failed(self._failure)

    def _log(self, rank: int) -> Path:
        return self._run.jobs / f"rank{rank}.log"


def place(rank: int, size: int, epoch: int) -> Place:
    """A rank's place on this machine, where it has the device of its own number; nothing else of the run has this job and epoch."""
    return Place("local", "local", "", epoch, rank, size, rank)


def main(path: str, rank: str, size: str, epoch: str, parent: str) -> None:
    """The life of a rank; raises what breaks it."""
    os.umask(0o077)
    end_with_parent(int(parent))
    run = RunFolder.open(Path(path))
    enlist(run)
    config = load(run.config)
    signals = Signals()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # nobody but rank 0 is asked to leave in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    from workers.trainer.follower import follow

    print(f"left: {follow(run, config, place(int(rank), int(size), int(epoch)), signals)}")


if __name__ == "__main__":
    main(*sys.argv[1:])

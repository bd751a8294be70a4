"""The run folder as the coordinator uses it: while it is full or away, reading and writing are left for a later call; after `run.outage_minutes` the
run ends. What is to be written is held meanwhile (run_records.py), and leases go on."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.coordinator.process.machine import Machine
from workers.coordinator.recording.inputs import Obstructed
from workers.run.folder import RunFolder
from workers.run.outage import Outage, is_outage, words
from workers.slurm import job


class Storage:
    """`limit_s`: how long it may be full or away. That it is so is said in the log, and in SLURM's comment on this job."""

    def __init__(self, run: RunFolder, machine: Machine, limit_s: float) -> None:
        self._run, self._machine, self._limit_s = run, machine, limit_s
        self._outage = Outage(limit_s)

    def attempt(self, work: Callable[[], object]) -> bool:
        """Do `work`, and return whether it was done: not where the run folder is full or away. Raises what else breaks it."""
        try:
            work()
        except OSError as error:
            if not is_outage(self._run, error):
                raise
            self._failed(words(self._run, error), time.monotonic())
            return False
        return True

    def _failed(self, why: str, now: float) -> None:
        if not self._outage.why:
            self._tell(f"{why}. What is to be written is held for {self._limit_s:g} s at most (run.outage_minutes)")
        self._outage.failed(why, now)
        self._machine.do(Obstructed(now))
        if self._outage.is_too_long(now):
            self._machine.end(f"{why}, and that for {self._outage.lasted_s(now):.0f} s (run.outage_minutes). "
                              f"Free some space, bring it back, or raise ulimit -n, then go on with: headway resume {self._run.path}")

    def worked(self) -> None:
        """What stands for all the rest could be written."""
        if self._outage.why:
            self._tell("", f"the run folder can be used again, after {self._outage.lasted_s(time.monotonic()):.0f} s")
        self._outage.worked()

    def _tell(self, comment: str, said: str = "") -> None:
        print(said or comment, flush=True)
        if self._machine.core.replaceable:
            job.comment_later(comment)

"""Before an element of the training array begins: the run is submitted whole, the element before it has gone, crashes in a row are followed by a
pause that grows, and too many of them end the run."""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.config import Config
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.run.incarnations import Incarnation
from workers.slurm import job as slurm
from workers.slurm.command import SlurmError
from workers.slurm.signals import Signals
from workers.slurm.submission import SubmissionWatch

MAX_BACKOFF_S = 300.0
PREDECESSOR_S = 40.0
"""A little more than SLURM's usual KillWait."""


class Beginning:
    """`job`: SLURM's id of this element; `saved_step`: the step of the newest whole checkpoint, -1 for none; `give_up` ends the run after so many
    crashes, of which the last had this cause."""

    def __init__(self, run: RunFolder, config: Config, job: str, signals: Signals, saved_step: Callable[[], int],
                 give_up: Callable[[int, str], None]) -> None:
        self.run, self.config, self._job, self.signals = run, config, job, signals
        self._saved_step, self._give_up = saved_step, give_up

    def may_begin(self) -> bool:
        """Wait until the run is submitted whole. Count the crashes in a row: too many end the run, one or more are followed by a pause."""
        watch = SubmissionWatch(self.run)
        while not watch.is_whole() and self.signals.received is None:
            time.sleep(0.5)
        self._wait_for_predecessor()
        past = incarnations.since_resumed(self.run)
        waiting = {job for job, state in self._own_states().items() if state in ("PENDING", "REQUEUED", "REQUEUE_HOLD")}
        in_order = not past or (past[-1].end is not None and past[-1].end.how in incarnations.IN_ORDER)
        crashes = 0 if in_order else incarnations.consecutive_crashes(past, self._saved_step(), waiting)
        silent = self._failed_without_a_word(past)
        if crashes >= self.config.cluster.max_consecutive_crashes:
            self._give_up(crashes, past[-1].end.cause if past and past[-1].end else "killed without a word")
            return False
        if crashes := crashes + silent:
            pause = min(MAX_BACKOFF_S, self.config.cluster.crash_backoff_s * 2 ** min(crashes - 1, 20))
            print(f"{crashes} crash(es) in a row: waiting for {pause:g} s (cluster.crash_backoff_s)", flush=True)
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline and self.run.ended() is None and self.signals.received is None:
                time.sleep(0.5)
        return self.run.ended() is None and self.signals.received is None

    def _failed_without_a_word(self, past: list[Incarnation]) -> int:
        """How many elements have failed since the last one that is on record, as SLURM's accounting has it: they could write nothing down."""
        since = max(self.run.resumed_at(), past[-1].claim.time if past else 0.0)
        return len(slurm.failures(slurm.arrays(self.run, "train"), since) - {incarnation.claim.job for incarnation in incarnations.history(self.run)})

    def _wait_for_predecessor(self) -> None:
        """SLURM starts the next element while one that was told to end is still saving: claiming now would fence it off. (An earlier life of this
        very job has ended.)"""
        past = incarnations.history(self.run)
        if not past or past[-1].end is not None or past[-1].claim.job == self._job:
            return
        last = past[-1].claim
        print(f"waiting for job {last.job} to end, {PREDECESSOR_S:g} s at most: it may still be saving", flush=True)
        deadline = time.monotonic() + PREDECESSOR_S
        while time.monotonic() < deadline and self.signals.received is None and self._own_states().get(last.job) in ("RUNNING", "COMPLETING"):
            if incarnations.history(self.run)[-1].end is not None:
                return
            time.sleep(1.0)

    def _own_states(self) -> dict[str, str]:
        try:
            return slurm.job_states(self.run.arrays("train"))
        except SlurmError as error:
            print(f"SLURM could not be asked for requeued elements: {error}", flush=True)
            return {}

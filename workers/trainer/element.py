"""One element of the training array: from its start to what follows it.

    rank 0   newest whole checkpoint -> crashes in a row? -> claim the next epoch -> coordinator -> train -> end on record
             how it ended:  run over -> exit          time limit -> exit 0, the array's next element goes on
                            preempted -> requeue      SIGTERM, crash -> exit 1, SLURM or the next element follows
    rank r   meets rank 0 and does what it says (follower.py)

On one machine there is one element, and nothing follows it; rank 0 starts the other ranks itself (local_ranks.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from workers.config import ClusterKind, Config
from workers.run import checkpoints, incarnations, outage
from workers.run.checkpoints import Checkpoint
from workers.run.folder import RunFolder
from workers.slurm import job as slurm
from workers.slurm import succession
from workers.slurm.job import SlurmElement
from workers.slurm.signals import Signals
from workers.trainer.beginning import Beginning
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.local_ranks import LocalGang

if TYPE_CHECKING:
    from workers.trainer.worker import TrainerWorker

Result = TypeVar("Result")
FAILURE_S = 3.0
"""Within this time after a connection to another rank broke, that rank's own end is noticed."""


class TrainElement:
    """Rank 0's life. `element` is None on one machine, where it has `num_ranks`."""

    def __init__(self, run: RunFolder, config: Config, element: SlurmElement | None, signals: Signals, num_ranks: int = 1) -> None:
        self.run, self.config, self.element, self.signals, self.num_ranks = run, config, element, signals, num_ranks
        self.restored: Checkpoint | None = None
        self.epoch = 0
        self._trainer: TrainerWorker | None = None
        self._gang: LocalGang | None = None
        self._failure = ""

    @property
    def step(self) -> int:
        """The newest completed step."""
        if self._trainer is not None:
            return self._trainer.version.step
        return self.restored.version.step if self.restored else 0

    def live(self) -> str:
        """Train until the run or this element is over; returns the run's cause if it has ended. Raises what broke."""
        try:
            return self._live()
        except outage.OutageTooLong as error:
            if self.element is not None:
                succession.end(self.run, "trainer", str(error.strerror))
            raise

    def _live(self) -> str:
        element = self.element
        if element is not None and not self._wait(lambda: self._may_begin(element)):
            return self._leave_before_beginning(element)
        self._begin()
        # The coordinator starts first: it and the rollout workers get ready while Megatron is being imported.
        link = CoordinatorLink(self.run, self.config, self.epoch, self.restored.coordinator if self.restored else None, self.signals, self._crashed)
        if self.element is not None:
            for array in slurm.arrays(self.run, "inference") + slurm.arrays(self.run, "reward"):
                slurm.release(array)  # workers that gave up waiting for a training job have had them held
        try:
            how, cause = self._train(link, self.restored)
        except BaseException as error:
            traceback.print_exc()
            link.fail((self._gang.first_failure(FAILURE_S) if self._gang else "") or f"the trainer failed: {type(error).__name__}: {error}")
            link.close()
            self._leave_failed()
            raise
        if how == "stopped" and cause:
            return self._leave_at_once(link, cause)
        if how == "drained":
            how = self._why_drained()
        self._wait(lambda: self._record(how, cause))
        if how == "terminated" and self.element is not None:
            succession.end_if_cancelled(self.run, "trainer", self.element.job)
        link.close(how if how in incarnations.IN_ORDER and how not in ("finished", "stopped") else "")
        return self._follow_up(how, cause)

    def _begin(self) -> None:
        """Claim the next epoch, which says from which whole checkpoint. Only then nobody else publishes any more: one that has come meanwhile is
        gone on from instead, and the claim corrected."""
        published = self._wait(lambda: checkpoints.all_checkpoints(self.run))
        self.restored = self._wait(self._newest_whole)
        job, name, restarts = (self.element.job, self.element.name, self.element.restarts) if self.element else ("", "", 0)
        self.epoch = self._wait(lambda: incarnations.claim(self.run, name, job, restarts, socket.gethostname(), os.getpid(), self.step))
        if (now := self._wait(lambda: checkpoints.all_checkpoints(self.run))) != published:
            published, self.restored = now, self._wait(self._newest_whole)
            self._wait(lambda: incarnations.correct(self.run, self.epoch, self.step))
        if published and self.restored is None:
            self._crashed(cause := checkpoints.none_whole(self.run, published))
            if self.element is None:
                self.run.end(cause, "trainer")
            sys.exit(1)
        print(f"epoch {self.epoch} begins with step {self.step}", flush=True)

    def _newest_whole(self) -> Checkpoint | None:
        """One rank compares all digests; several compare theirs when they load, and put aside what is broken then."""
        num_ranks = self.element.world_size if self.element else self.num_ranks
        return checkpoints.newest(self.run, by_digests=num_ranks == 1)

    def _train(self, link: CoordinatorLink, restored: Checkpoint | None) -> tuple[str, str]:
        if self.element is None and self.num_ranks > 1:
            self._gang = LocalGang(self.run, self.num_ranks, self.epoch, link.fail)
        from workers.trainer import ranks
        from workers.trainer.megatron.checkpoint.checkpoint import BrokenState
        from workers.trainer.worker import TrainerWorker

        place = self._gang.place if self._gang else self.element
        gang = ranks.gather(self.run, self.config, place, self.epoch, restored.folder if restored else None) if place else ranks.Ranks()
        try:
            self._trainer = TrainerWorker(self.run, self.config, link, self.epoch, restored, gang)
        except BrokenState as error:  # at once: the other ranks are leaving, and this one is ended with them
            if restored is not None:
                checkpoints.put_aside(restored, str(error))
            raise
        ending = self._trainer.train()
        if self._gang is not None:
            self._gang.join()
        return ("stopped" if ending.how == "ended" else ending.how), ending.cause

    # -- before ----------------------------------------------------------------------------------------------------------

    def _may_begin(self, element: SlurmElement) -> bool:
        return Beginning(self.run, self.config, element.job, self.signals, self._saved_step, self._give_up).may_begin()

    def _wait(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which waits while the run folder is full or away, and says so. Raises what `work` does."""
        def tell(text: str) -> None:
            outage.say(text)
            if self.element is not None:
                slurm.comment(text)

        return outage.patiently(self.run, work, tell, lambda: self.signals.received is signal.SIGTERM)

    def _leave_before_beginning(self, element: SlurmElement) -> str:
        if self.signals.received is signal.SIGTERM:
            succession.end_if_cancelled(self.run, "trainer", element.job)
        if (outcome := self.run.ended()) is not None:
            self.run.remove_weights(self.config.weights.dir)  # of an incarnation that was killed
            return outcome["cause"]
        if self.signals.received is not None and slurm.is_to_come_back(
                element, self.signals.received, self.signals.at, self.config.cluster.signal_delay_s):
            slurm.requeue(element.job)
        return ""

    def _saved_step(self) -> int:
        """The step of the newest whole checkpoint, -1 for none: of this incarnation, else the one it began with, else of those that are there."""
        own = [checkpoint for checkpoint in checkpoints.all_checkpoints(self.run) if checkpoint.version.epoch == self.epoch]
        whole = own[-1] if own else self.restored if self.epoch else self._newest_whole()
        return whole.version.step if whole else -1

    def _give_up(self, crashes: int, cause: str) -> None:
        self.run.end(f"training has crashed {crashes} times in a row without a new checkpoint (cluster.max_consecutive_crashes); the last time: "
                     f"{cause}", "trainer")
        self._cancel_waiting_if_over()

    # -- after -----------------------------------------------------------------------------------------------------------

    def _why_drained(self) -> str:
        """What the signal meant: the time limit, a preemption, or the end of the job for another reason."""
        if self.run.stop_requested() is not None or self.signals.received is None or self.element is None:
            return "drained"
        if slurm.is_to_come_back(self.element, self.signals.received, self.signals.at, self.config.cluster.signal_delay_s):
            return "preempted"
        return "walltime" if self.signals.received is signal.SIGUSR2 else "terminated"

    def _record(self, how: str, cause: str) -> None:
        incarnations.record_end(self.run, self.epoch, how, cause, self.step, self._saved_step())

    def _crashed(self, cause: str) -> None:
        """Put a crash on record; called from any thread of the link. Raises OSError; the cause is kept, to be recorded later."""
        self._failure = self._failure or cause
        if (outcome := self.run.ended()) is not None:
            self._record("stopped", outcome["cause"])
            return
        if self.run.newest_epoch() != self.epoch:
            self._record("fenced", cause)
            return
        self._record("crashed", cause)
        if self.element is None:
            return
        crashes = incarnations.consecutive_crashes(incarnations.since_resumed(self.run), self._saved_step(), set())
        if crashes >= self.config.cluster.max_consecutive_crashes:
            self._give_up(crashes, cause)

    def _leave_at_once(self, link: CoordinatorLink, cause: str) -> str:
        """The link says that it is over, and ends this process within seconds unless it is closed: what cannot be recorded by then is afterwards."""
        with contextlib.suppress(OSError):
            if self._failure:
                self._crashed(self._failure)
            self._record("stopped", cause)
        link.close()
        if self.run.known_end() is None:  # the coordinator may have gone without having been able to put it there
            self._leave_failed() if self._failure else self._wait(lambda: self.run.end(cause, "trainer"))
        return self._follow_up("stopped", cause)

    def _leave_failed(self) -> None:
        """Put this failure on record as soon as the run folder takes it. The run ends where it never does, or where nobody follows."""
        try:
            self._wait(lambda: self._crashed(self._failure))
            ours = self.run.ended() is None and self.run.newest_epoch() == self.epoch
            if ours and self.element is not None and not succession.is_followed(self.run, self.element.job):
                succession.end(self.run, "trainer")
        except OSError:
            if self.element is not None:
                succession.end(self.run, "trainer", self._failure)
        self._cancel_waiting_if_over()

    def _cancel_waiting_if_over(self) -> None:
        with contextlib.suppress(OSError):  # the run folder is away: it has been done
            if self.element is not None and self.run.ended() is not None:
                slurm.cancel_waiting_of(self.run)

    def _follow_up(self, how: str, cause: str) -> str:
        if how == "preempted" and self.element is not None:
            slurm.requeue(self.element.job)  # an element that just exits in its grace time would be taken for complete
        if how == "terminated" or (how == "stopped" and cause and self.run.stop_requested() is None):
            sys.exit(1)  # an orderly stop is no error, and srun shall not call it one in the log
        return "" if how in incarnations.IN_ORDER else cause


def run_trainer(run: RunFolder, config: Config, num_ranks: int) -> str:
    """The training element's life, whatever its rank; returns why the run ended ('' where it is complete, or goes on). `num_ranks`: on one
    machine."""
    signals = Signals()
    element = slurm.current() if config.cluster.kind is ClusterKind.slurm else None
    if element is not None and element.rank > 0:
        from workers.trainer.follower import follow

        return follow(run, config, element, signals)
    return TrainElement(run, config, element, signals, num_ranks).live()

"""What ends or pauses a run from outside of its messages.

    run folder   another incarnation's claim | an outcome | `headway stop` | a launcher that died while attached --> machine.py
    time         training has had `run.max_hours`, over all incarnations --> the same as `headway stop --drain`
"""

from __future__ import annotations

import asyncio
import time

from workers.config import Config
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.shutdown import cancel_waiting
from workers.coordinator.recording.inputs import Left, Paused
from workers.run import incarnations
from workers.run.folder import RunFolder


class Outside:
    """Of the incarnation `epoch`, which begins now."""

    def __init__(self, run: RunFolder, config: Config, epoch: int, machine: Machine) -> None:
        self._run, self._epoch, self._machine, self._max_hours = run, epoch, machine, config.run.max_hours
        claim = incarnations.claim_of(run, epoch)
        self._time_is_up = time.monotonic() - (time.time() - claim.time) - claim.trained_s + 3600 * self._max_hours
        self._cancelling: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Look, and tell the state machine. Raises OSError where the folder is full or away."""
        now = time.monotonic()
        if self._run.newest_epoch() != self._epoch:
            self._machine.do(Left(now, "another incarnation of the training job has begun"))
        elif (outcome := self._run.ended()) is not None:
            self._machine.end(outcome["cause"] or "the run was ended from outside")
        elif (stop := self._run.stop_requested()) is not None:
            self._stop(stop["reason"], stop["drain"], now)
        elif self._run.launcher_is_gone():
            self._machine.end("the launcher has died while attached; start with --detach for a run that outlives it")
        elif now > self._time_is_up:
            self._run.request_stop(f"run.max_hours={self._max_hours:g} is used up, and a larger one is needed to go on", drain=True)

    def _stop(self, reason: str, drain: bool, now: float) -> None:
        core = self._machine.core
        if not drain:
            self._machine.end(f"stopped: {reason}")
        elif not core.drain_reason:
            self._cancelling = asyncio.create_task(asyncio.to_thread(cancel_waiting, core, self._run))
            self._machine.do(Paused(now, reason))

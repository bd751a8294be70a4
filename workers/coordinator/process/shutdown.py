"""How a coordinator goes away.

The run has ended: record the outcome, cancel the elements that wait in the queue, say Finish to every worker, wait for their Goodbye
(at most `GOODBYE_S`), write the summary, remove the published weights, have the report written. A failure is recorded first of all; a
complete run only at the end, because the trainer may still fail to export the model, for which it has all the time it needs while it is
heard from.

Only this incarnation ends (time limit, preemption, crash of the trainer): tell the workers that another one will come. If the whole
run was asked to pause (`stop --drain`), nobody is left to tell, and the outcome says that it can be resumed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Protocol

from workers.config import Config
from workers.coordinator.core import TICK_S, Coordinator
from workers.coordinator.monitoring import reporting
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.run_records import RunRecords
from workers.coordinator.recording.inputs import Ticked, Unreachable
from workers.messages.from_coordinator import Finish, HeartbeatReply, Suspended
from workers.messages.parts import Role
from workers.run.files import write_atomic
from workers.run.folder import RunFolder
from workers.run.processes import describe_exit
from workers.slurm import job
from workers.transport.server import ServerSockets

GOODBYE_S = 15.0
CANCEL_S = 5.0
REPORT_S = 8.0
"""With the goodbyes, less than the trainer waits for its coordinator to end."""


def cancel_waiting(core: Coordinator, run: RunFolder) -> None:
    """Cancel the elements that wait in SLURM's queue; outside SLURM there are none."""
    if core.replaceable:
        job.cancel_waiting_of(run)


async def write_report(run: RunFolder) -> None:
    """Have report.html written, as `headway report` does it: by a process of its own, whose failure is said in this one's log and changes
    nothing."""
    process = None
    try:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "launcher.report", str(run.path), stdin=asyncio.subprocess.DEVNULL)
        status = await asyncio.wait_for(process.wait(), REPORT_S)
        trouble = describe_exit(status) if status else ""
    except TimeoutError:
        trouble = f"takes more than {REPORT_S:g} s"
    except OSError as error:
        trouble = f"cannot be started ({error})"
    finally:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                process.kill()
            await process.wait()
    if trouble:
        print(f"no report: its process {trouble}. Later: headway report {run.path}", flush=True)


class Process(Protocol):
    """What it takes to go away: the state machine and what drives it (main.py)."""

    core: Coordinator
    machine: Machine
    run: RunFolder
    config: Config
    sockets: ServerSockets
    records: RunRecords

    @property
    def seconds(self) -> float: ...

    async def receive(self, receiving: asyncio.Task) -> asyncio.Task: ...

    def write_status(self) -> None: ...

    def on_disk(self, write: Callable[[], object]) -> None: ...


class Shutdown:
    """The end of one coordinator's life."""

    def __init__(self, process: Process) -> None:
        self.process, self.core, self.run = process, process.core, process.run

    async def go(self, receiving: asyncio.Task) -> int:
        """Go away in order; returns the exit status: 0 unless the run has failed."""
        if self.core.ended is not None:
            await self._end(receiving)
            return 1 if self.core.ended else 0
        if self.core.drain_reason:
            if self._is_fenced():
                return 0
            if self.core.left_in_order:
                self._record(self.core.drain_reason, "drained")
            else:
                self._record(f"{self.core.left}. That was while the run was being drained: it can be resumed from its last checkpoint")
            self.run.remove_weights(self.process.config.weights.dir)
        reason = self.core.left or ""
        for peer in list(self.core.registry.workers):
            await self.process.sockets.send(peer, Suspended(reason))
        if self.core.drain_reason:
            await write_report(self.run)
        return 0

    def _is_fenced(self) -> bool:
        """Whether another incarnation is known to have begun."""
        with contextlib.suppress(OSError):
            return self.run.newest_epoch() != self.core.epoch
        return False

    def _record(self, cause: str, state: str = "") -> None:
        """Record the outcome. Where the run folder does not take it that is said, and everybody is told to leave all the same."""
        try:
            self.run.end(cause, "coordinator", state)
        except OSError as error:
            print(f"the outcome is not on record ({error}): {cause or 'complete'}", flush=True)

    async def _end(self, receiving: asyncio.Task) -> None:
        seconds = self.process.seconds
        if self.core.ended:
            self._record(self.core.ended)
        self.process.write_status()  # so that nobody wonders why rollout workers leave while the trainer still exports
        cancelling = asyncio.create_task(asyncio.to_thread(cancel_waiting, self.core, self.run))
        await asyncio.wait([cancelling], timeout=CANCEL_S)  # no longer: the workers must hear of us
        deadline = time.monotonic() + GOODBYE_S
        told: set[bytes] = set()
        next_told = 0.0
        while workers := self.core.registry.workers:
            now = time.monotonic()
            if now > deadline and (self.core.ended or not self.core.registry.of(Role.trainer)):
                break
            if now >= next_told:
                next_told = now + TICK_S
                await self._tell(list(workers), told)
            receiving = await self.process.receive(receiving)
            self.process.machine.do(Ticked(time.monotonic()))
            self.process.machine.take_sending()
        receiving.cancel()
        await asyncio.wait([cancelling], timeout=GOODBYE_S)
        self._record(self.core.ended or "")
        summary = reporting.summary(self.core, self.process.records.evaluations, seconds)
        self.process.on_disk(lambda: write_atomic(self.run.summary, json.dumps(summary, indent=2).encode() + b"\n"))
        self.run.remove_weights(self.process.config.weights.dir)
        await write_report(self.run)

    async def _tell(self, peers: list[bytes], told: set[bytes]) -> None:
        """Say Finish to each of `peers` once, and write to it again afterwards: that fails to a dead one, for which nobody waits longer than for any
        lost connection. A Goodbye that it said before is still to be read; if it comes back, it hears Finish again."""
        for peer in peers:
            message = HeartbeatReply(self.core.training.announcement, known=True) if peer in told else Finish(self.core.ended or "")
            if await self.process.sockets.send(peer, message):
                told.add(peer)
            else:
                told.discard(peer)
                self.process.machine.do(Unreachable(time.monotonic(), peer))

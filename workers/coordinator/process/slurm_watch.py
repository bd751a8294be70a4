"""Asks SLURM about workers that are silent, and whether more are to come. Only where there is something to ask about.

    silent worker whose element does not run any more  --> lost at once, without waiting for the heartbeat's limit
    fewer workers than training needs, of either kind  --> are there elements that wait in the queue? If not, who has cancelled them?
"""

from __future__ import annotations

import asyncio
import time

from workers.coordinator.process.machine import Machine
from workers.coordinator.recording.inputs import Expected, Lost
from workers.messages.parts import Role
from workers.run.folder import RunFolder
from workers.slurm import job
from workers.slurm.command import SlurmError

INTERVAL_S = 5.0
LACKING_S = 30.0
SILENT_HEARTBEATS = 3
ARRAYS = {Role.rollout: "inference", Role.reward: "reward"}
ALIVE = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "RESIZING", "SIGNALING")


class SlurmWatch:
    """Looks every `INTERVAL_S` seconds, and asks SLURM only where the answer matters."""

    def __init__(self, run: RunFolder, machine: Machine) -> None:
        self._run, self._machine, self._core = run, machine, machine.core

    def _why_gone(self, role: str) -> str:
        who = job.cancelled_by(self._run.arrays(role), self._run.resumed_at())
        return f"its array was cancelled by {who}" if who else "none of its elements is left in SLURM's queue"

    async def watch(self) -> None:
        """For as long as the coordinator lives; does nothing outside SLURM, nor where there are no rollout workers."""
        next_look = 0.0
        while self._core.replaceable and not self._core.config.supervised:
            await asyncio.sleep(INTERVAL_S)
            now, limit = time.monotonic(), SILENT_HEARTBEATS * self._core.registry.interval_s
            silent = [worker for role in ARRAYS for worker in self._core.registry.of(role) if worker.job and now - worker.last_heard > limit]
            lacking = self._core.lacking
            if not silent and not (lacking and now >= next_look):
                continue
            next_look = now + LACKING_S
            try:
                queued = {role: await asyncio.to_thread(job.states, self._run.arrays(name)) for role, name in ARRAYS.items()}
                waiting = [array for role in lacking for array in self._run.arrays(ARRAYS[role])]
                gone = {role: await asyncio.to_thread(self._why_gone, ARRAYS[role]) for role in lacking if not queued[role]}
                # Some may have gone back to the queue, held, just when this training job started.
                for array in waiting:
                    await asyncio.to_thread(job.release, array)
            except (SlurmError, OSError) as error:
                print(f"SLURM could not be asked about silent workers: {error}", flush=True)
                continue
            self._machine.do(Expected(time.monotonic(), [role for role, states in queued.items() if states], gone))
            for worker in silent:
                states = queued[worker.role]
                if states.get(worker.job, "gone") not in ALIVE:
                    why = f"SLURM says that its element {worker.job} is {states.get(worker.job, 'gone')}"
                    self._machine.do(Lost(time.monotonic(), worker.peer, why))

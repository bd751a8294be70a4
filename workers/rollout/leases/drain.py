"""A rollout worker that leaves before the run is over loses nothing: every token is handed over, or written down.

    park        generation stops, running requests come back with their tokens so far, each lease becomes a GroupParked
    hand over   what is finished and what is parked is sent until the coordinator has acknowledged it
    spill       what it has not acknowledged in time becomes files in partials/, for the coordinator that comes next

Waits: half of the time for the engine, the rest for acknowledgements; none of them without a coordinator in touch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from workers.rollout.engines.client import EngineError
from workers.rollout.engines.sampler import Sampler
from workers.rollout.leases.lease_runner import LeaseRunner
from workers.rollout.leases.outbox import Results
from workers.run.folder import RunFolder

ANSWER_S, LOOK_S = 5.0, 0.01


@dataclass
class Holdings:
    """What a worker holds and may have to give back. Without an engine so far, `sampler` and `leases` are None."""

    run: RunFolder
    results: Results
    sampler: Sampler | None = None
    leases: LeaseRunner | None = None

    def closing(self) -> None:
        """From now on whatever ends unfinished is parked."""
        if self.leases is not None:
            self.leases.park_from_now()

    async def park(self, limit_s: float) -> None:
        """Stop generation and turn every running lease into a result."""
        self.closing()
        if self.sampler is None or self.leases is None:
            return
        try:
            if not await self.sampler.halt(limit_s):
                print(f"warning: the engine has not given back all tokens within {limit_s:g} s; what it had not sent yet is lost", flush=True)
        except EngineError as error:
            print(f"warning: the engine cannot give back what it is generating: {error}", flush=True)
        await self.leases.abandon(limit_s / 2)

    async def hand_over(self, limit_s: float, serving: asyncio.Task, answered: Callable[[], bool] = lambda: True) -> None:
        """Park, deliver as long as `serving` goes on, and spill the rest; all but the writing within `limit_s` seconds. `answered`: whether the
        coordinator knows: leases that it gave before have come by then, and are given back as well."""
        deadline = time.monotonic() + limit_s
        await self.park(limit_s / 2)
        known_by = min(deadline, time.monotonic() + ANSWER_S)
        while not (answered() or serving.done() or time.monotonic() > known_by):
            await asyncio.sleep(LOOK_S)
        self.results.send_again()
        delivering = asyncio.create_task(self.results.delivered(deadline - time.monotonic()))
        await asyncio.wait([delivering, serving], return_when=asyncio.FIRST_COMPLETED)
        delivering.cancel()
        self.spill()

    def spill(self) -> None:
        """Write down what nobody has acknowledged."""
        try:
            num_spilled = self.results.spill(self.run)
        except OSError as error:
            print(f"what no coordinator has taken is lost, it will be generated again: {error}", flush=True)
            return
        if num_spilled:
            print(f"{num_spilled} groups that no coordinator has taken are in {self.run.partials}", flush=True)

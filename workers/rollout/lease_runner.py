"""Runs the leases of one rollout worker: one task each, and its result sent until it is acknowledged.

    lease --> wait for its version --> workflow --> GroupFinished | GroupFailed --> coordinator      (again every RESEND_S)
                                                    + Credit for its samples

Who waits for whom: a lease waits for its version to be loaded; nothing waits for another lease.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from workers.messages.types import Credit, Group, GroupFailed, GroupFinished, Lease, Message, Purpose
from workers.processes import first_cause
from workers.reward.pool import VerifierError
from workers.rollout.engine_client import BadRequest, EngineError
from workers.rollout.servers.process import ServerProcess
from workers.rollout.weight_updates import WeightHolder
from workers.rollout.workflows.single_turn import SingleTurn

RESEND_S = 5.0
ENGINE_EXIT_S = 1.0


class LeaseRunner:
    """The leases in flight. `broken` fails with whatever a lease raised that is neither the engine's nor a verifier's failure."""

    def __init__(self, send: Callable[[Message], Awaitable[None]], workflow: SingleTurn, holder: WeightHolder, server: ServerProcess) -> None:
        self._send, self._workflow, self._holder, self._server = send, workflow, holder, server
        self._running: dict[asyncio.Task, Lease] = {}
        self._unacknowledged: dict[tuple[str, int], tuple[float, Message]] = {}
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        self.tokens_generated = self.tokens_interrupted = 0
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_running(self) -> int:
        """Leases in flight."""
        return len(self._running)

    @property
    def num_samples(self) -> int:
        """Samples in flight."""
        return sum(self._workflow.num_samples(lease) for lease in self._running.values())

    @property
    def idle_s(self) -> float:
        """Seconds without any lease so far."""
        return self._idle_s + (0.0 if self._running else time.monotonic() - self._idle_since)

    def start(self, lease: Lease) -> None:
        """Begin to work on a lease."""
        self._idle_s, self._idle_since = self.idle_s, time.monotonic()
        task = asyncio.create_task(self._run(lease))
        self._running[task] = lease
        task.add_done_callback(self._ended)

    def acknowledged(self, group_id: str, attempt: int) -> None:
        """The coordinator has the result: it need not be sent again."""
        self._unacknowledged.pop((group_id, attempt), None)

    async def resend(self) -> None:
        """Send again, for as long as the worker runs, what has not been acknowledged for `RESEND_S` seconds."""
        while True:
            await asyncio.sleep(RESEND_S / 2)
            for key, (sent, message) in list(self._unacknowledged.items()):
                if time.monotonic() - sent > RESEND_S:
                    self._unacknowledged[key] = (time.monotonic(), message)
                    await self._send(message)

    async def abandon(self) -> None:
        """Cancel all leases and wait until they are gone."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _ended(self, task: asyncio.Task) -> None:
        del self._running[task]
        self._idle_since = time.monotonic()
        if not task.cancelled() and (error := task.exception()) is not None and not self.broken.done():
            self.broken.set_exception(error)

    async def _run(self, lease: Lease) -> None:
        await self._holder.at_least(lease.version)
        message: Message
        try:
            group = await self._workflow.run(lease)
        except* BadRequest as errors:
            message = GroupFailed(lease.group_id, lease.attempt, first_cause(errors), fatal=True)
        except* (EngineError, VerifierError) as errors:
            message = GroupFailed(lease.group_id, lease.attempt, first_cause(errors))
        else:
            message = GroupFinished(group)
            self._count(group)
        if isinstance(message, GroupFailed) and await self._server.exited_within(ENGINE_EXIT_S) is not None:
            return  # the engine is gone, and this worker with it: the coordinator gives all its leases to others, at no fault of theirs
        self._unacknowledged[lease.group_id, lease.attempt] = (time.monotonic(), message)
        await self._send(message)
        await self._send(Credit(self._workflow.num_samples(lease)))

    def _count(self, group: Group) -> None:
        if group.purpose is Purpose.training:
            self.tokens_generated += group.tokens.size
            self.tokens_interrupted += group.tokens_interrupted

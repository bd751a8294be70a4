"""Runs the leases of one rollout worker: one task each, whose result is kept until it is acknowledged (outbox.py).

    lease --> workflow --> group_filter.py --> GroupFinished | GroupRejected | GroupFailed --> results
                 |
                 +-- halted, abandoned --> GroupParked, with all tokens so far --> results

Who waits for whom: a lease waits for a server that holds its version and has room (rollout/engines/engine_pool.py).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from workers.messages.from_worker import GroupFailed, GroupParked
from workers.messages.parts import Group, HeldLease, Lease, Purpose
from workers.reward.pool.pool import VerifierError
from workers.rollout.engines.client import BadRequest, EngineError
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.group_routing import Key, key_of
from workers.rollout.leases.outbox import Result, Results
from workers.rollout.workflows.episode import Halted, WorkflowError
from workers.rollout.workflows.group_filter import GroupFilter
from workers.rollout.workflows.partials import park
from workers.rollout.workflows.transcript import GroupRecord
from workers.rollout.workflows.workflow import Workflow
from workers.run.processes import first_cause


@dataclass
class Running:
    """A lease at work. `wanted`: the coordinator has not said that it may be given up."""

    lease: Lease
    record: GroupRecord
    task: asyncio.Task[Result | None] = field(init=False)
    wanted: bool = True


class LeaseRunner:
    """The leases in flight. `broken` fails with whatever a lease raised that is neither the engine's nor a verifier's nor a workflow's failure."""

    def __init__(self, results: Results, workflow: Workflow, group_filter: GroupFilter, engines: Engines) -> None:
        self._results, self._workflow, self._filter, self._engines = results, workflow, group_filter, engines
        self._running: dict[Key, Running] = {}
        self._parks = False
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        self._sample_s, self._counted_at = 0.0, self._idle_since
        self.tokens_generated = 0
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_running(self) -> int:
        """Leases in flight."""
        return len(self._running)

    @property
    def num_live(self) -> int:
        """Samples of these leases that have not come to their end."""
        return sum(running.record.num_live for running in self._running.values())

    @property
    def idle_s(self) -> float:
        """Seconds without any lease so far."""
        return self._idle_s + (0.0 if self._running else time.monotonic() - self._idle_since)

    def count_sample_s(self) -> float:
        """Seconds of every sample while it was generated, added up: of those that run now, since this was asked last (with every heartbeat)."""
        now = time.monotonic()
        self._sample_s, self._counted_at = self._sample_s + self.num_live * (now - self._counted_at), now
        return self._sample_s

    def held(self) -> list[HeldLease]:
        """The leases in flight."""
        leases = [running.lease for running in self._running.values()]
        return [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in leases]

    def start(self, lease: Lease) -> None:
        """Begin to work on a lease; one that is held already is ignored. After `park_from_now` it is given back at once."""
        key = key_of(lease)
        if key in self._running or key in self._results:
            return
        running = Running(lease, self._workflow.begin(lease))
        if self._parks:
            self._park(running)
            return
        self._idle_s, self._idle_since = self.idle_s, time.monotonic()
        self._running[key] = running
        running.task = asyncio.create_task(self._run(running))
        running.task.add_done_callback(lambda _: self._ended(running))

    def give_up(self, key: Key) -> None:
        """End the work on a lease that nobody wants any more; nothing is sent."""
        running = self._running.get(key)
        if running is not None:
            running.wanted = False
            running.task.cancel()

    def park_from_now(self) -> None:
        """From now on whatever ends before it is finished is given back with what has been generated."""
        self._parks = True

    async def abandon(self, limit_s: float | None = None) -> None:
        """Cancel all leases and wait until they are gone, or for `limit_s` seconds: a workflow's function may take its time to end."""
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)

    def _ended(self, running: Running) -> None:
        del self._running[key_of(running.lease)]
        self._engines.release(running.lease)
        self._idle_since = time.monotonic()
        task = running.task
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.broken.done():
            self.broken.set_exception(error)
        if not running.wanted:
            return
        result = None if task.cancelled() or error is not None else task.result()
        if self._parks and (result is None or (isinstance(result, GroupFailed) and not result.fatal)):
            self._park(running)
        elif result is not None:
            self._results.add(running.lease, result)

    def _park(self, running: Running) -> None:
        if running.lease.purpose is Purpose.training:  # an evaluation begins anew elsewhere: its answers are short, and of one version
            self._results.add(running.lease, GroupParked(park(running.lease, running.record)))

    async def _run(self, running: Running) -> Result | None:
        """The result of a lease; None where it was not finished through no fault of its own."""
        lease, failed = running.lease, None
        try:
            group = await self._workflow.run(lease, running.record)
        except* BadRequest as errors:
            failed = GroupFailed(lease.group_id, lease.attempt, first_cause(errors), fatal=True)
        except* (EngineError, VerifierError, WorkflowError) as errors:
            hopeless = errors.subgroup(lambda error: isinstance(error, VerifierError) and error.hopeless) is not None
            failed = failed or GroupFailed(lease.group_id, lease.attempt, first_cause(errors), hopeless=hopeless)
        except* Halted:
            pass
        else:
            self._count(group)
            return self._filter.verdict(group)
        return failed

    def _count(self, group: Group) -> None:
        if group.purpose is Purpose.training:
            self.tokens_generated += int(group.loss_mask.sum())

"""The rollout worker: generates without ever waiting for training.

    coordinator --Leases--> one task a lease: wait for the lease's version, run the workflow --GroupFinished--> coordinator
    coordinator --version-> weight holder: pause, load, continue (tokens so far are kept)
    engine (child process) <--HTTP-- sampler          reward pool (child processes) <--pipes-- workflow

Who waits for whom: a lease waits for its version to be loaded; nothing waits for another lease. A finished group is sent
again every `RESEND_S` until it is acknowledged. Whatever ends first (the run, the engine, the coordinator, a signal)
ends all the rest, in `work`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Coroutine
from pathlib import Path

from tokenizers import Tokenizer

from workers.config import Config
from workers.messages.types import (
    Acknowledged,
    Announcement,
    Credit,
    Group,
    GroupFailed,
    GroupFinished,
    Heartbeat,
    Lease,
    Leases,
    Message,
    Purpose,
    Refused,
    Role,
    Version,
    Welcome,
    WorkerFailed,
    WorkerStatus,
)
from workers.processes import OUT_OF_TIME, TOLD_TO_END, first_cause
from workers.reward.pool import RewardPool, VerifierError
from workers.rollout.engine_client import BadRequest, EngineClient, EngineError
from workers.rollout.sampler import Sampler
from workers.rollout.servers.process import ServerProcess
from workers.rollout.weight_updates import WeightHolder
from workers.rollout.workflows.single_turn import SingleTurn
from workers.rundir import RunFolder
from workers.transport.peer import Peer

RESEND_S = 5.0
ENGINE_EXIT_S = 1.0


class WorkerEnded(RuntimeError):
    """Something that this worker cannot live without has ended."""


class RolloutWorker:
    """One replica: an engine, a reward pool, and the leases it holds."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self.run, self.config = run, config
        self._running: dict[asyncio.Task, Lease] = {}
        self._unacknowledged: dict[tuple[str, int], tuple[float, Message]] = {}
        self._tokens_generated = self._tokens_interrupted = 0
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        self._newest: Announcement | None = None
        self._holder: WeightHolder | None = None
        self._rewards: RewardPool | None = None
        self._server: ServerProcess | None = None
        self._peer: Peer | None = None
        self._credit_due = asyncio.Event()
        self._broken_lease: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def in_touch(self) -> bool:
        """Whether the coordinator knows us and is heard."""
        return self._peer is not None and self._peer.in_touch

    async def work(self) -> str:
        """Work until the run is over; returns its cause. Raises `WorkerEnded`, `CoordinatorLost` or what broke."""
        config = self.config
        peer = Peer(self.run, config.transport, Role.rollout, config.rollout.max_idle_minutes * 60, heartbeat=self._heartbeat,
                    on_message=self._on_message, on_announcement=self._on_announcement)
        async with peer:
            self._peer = peer
            serving = asyncio.create_task(peer.serve())
            parts = [serving, asyncio.create_task(self._operate(peer)), asyncio.create_task(self._told_to_end())]
            try:
                await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                error = next((error for part in parts if part.done() and (error := part.exception()) is not None), None)
                if error is None:
                    return serving.result()
                await peer.send(WorkerFailed(first_cause(error)))
                raise error
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)

    def _told_to_end(self) -> Coroutine[None, None, None]:
        told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def tell(reason: str) -> None:
            if not told.done():
                told.set_result(reason)

        async def end() -> None:
            raise WorkerEnded(f"the rollout worker ended: {await told}")

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, tell, TOLD_TO_END)
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, tell, OUT_OF_TIME)
        return end()

    async def _operate(self, peer: Peer) -> None:
        """Run engine, reward pool and leases until one of them breaks."""
        config, model = self.config, Path(self.config.model.path)
        self._server = server = ServerProcess(config.engine, model, self.run.jobs / f"engine-{os.getpid()}.log")
        engine: EngineClient | None = None
        try:
            engine = await server.start(Version(0, 0))
            self._holder = holder = WeightHolder(engine, config.engine.interrupt, peer.beat)
            if self._newest is not None:
                holder.announce(self._newest)
            async with RewardPool(config.reward) as self._rewards:
                sampler = Sampler(engine, Tokenizer.from_file(str(model / "tokenizer.json")), lambda: holder.num_pauses)
                self._workflow = SingleTurn(sampler, self._rewards, config.workflow, config.reward, config.engine.context_length)
                try:
                    await self._serve_leases(peer, server)
                finally:
                    await self._abandon_leases()
        finally:
            if engine is not None:
                await engine.close()
            await server.stop()

    async def _abandon_leases(self) -> None:
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _serve_leases(self, peer: Peer, server: ServerProcess) -> None:
        assert self._holder is not None
        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (self._holder.follow(), self._resend(), self._give_credit(peer), self._engine_exits(server), self._lease_breaks()):
                    tasks.create_task(part)
        except* EngineError as errors:
            # What failed was a call to the engine; if that is because the engine died, its death is the cause.
            if (how := await server.exited_within(ENGINE_EXIT_S)) is not None:
                raise WorkerEnded(how) from errors
            raise

    async def _give_credit(self, peer: Peer) -> None:
        """Credit for all slots, at the first welcome and whenever the coordinator has forgotten us and taken us in anew."""
        slot = -1
        while True:
            await self._credit_due.wait()
            self._credit_due.clear()
            if slot == peer.slot:
                continue
            slot, size = peer.slot, self.config.workflow.group_size
            capacity = max(size, self.config.engine.num_slots // size * size)
            running = sum(self._workflow.num_samples(lease) for lease in self._running.values())
            if capacity > running:
                await peer.send(Credit(capacity - running))

    async def _engine_exits(self, server: ServerProcess) -> None:
        raise WorkerEnded(await server.exited())

    async def _lease_breaks(self) -> None:
        await self._broken_lease

    async def _resend(self) -> None:
        while True:
            await asyncio.sleep(RESEND_S / 2)
            for key, (sent, message) in list(self._unacknowledged.items()):
                if time.monotonic() - sent > RESEND_S:
                    self._unacknowledged[key] = (time.monotonic(), message)
                    await self._send(message)

    async def _send(self, message: Message) -> None:
        assert self._peer is not None
        await self._peer.send(message)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._credit_due.set()
            case Leases():
                for lease in message.leases:
                    self._start(lease)
            case Acknowledged():
                self._unacknowledged.pop((message.group_id, message.attempt), None)
            case Refused():
                print(f"the coordinator refused a message: {message.reason}", flush=True)

    def _on_announcement(self, announcement: Announcement) -> None:
        self._newest = announcement
        if self._holder is not None:
            self._holder.announce(announcement)

    def _start(self, lease: Lease) -> None:
        if not self._running:
            self._idle_s += time.monotonic() - self._idle_since
        task = asyncio.create_task(self._run_lease(lease))
        self._running[task] = lease
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        del self._running[task]
        if not self._running:
            self._idle_since = time.monotonic()
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken_lease.done():
            self._broken_lease.set_exception(error)

    async def _run_lease(self, lease: Lease) -> None:
        assert self._holder is not None
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
        if isinstance(message, GroupFailed) and await self._server.exited_within(ENGINE_EXIT_S) is not None:  # type: ignore[union-attr]
            return  # the engine is gone, and this worker with it: the coordinator gives all its leases to others, at no fault of theirs
        self._unacknowledged[lease.group_id, lease.attempt] = (time.monotonic(), message)
        await self._send(message)
        await self._send(Credit(self._workflow.num_samples(lease)))

    def _count(self, group: Group) -> None:
        if group.purpose is Purpose.training:
            self._tokens_generated += group.tokens.size
            self._tokens_interrupted += group.tokens_interrupted

    # -- heartbeat -----------------------------------------------------------------------------------------------------

    def _heartbeat(self) -> Heartbeat:
        holder, rewards = self._holder, self._rewards
        idle = self._idle_s + (0.0 if self._running else time.monotonic() - self._idle_since)
        waiting = "" if self._running else "leases"
        if holder is None or holder.held is None:
            waiting = "weights"
        status = WorkerStatus(
            waiting_for=waiting, num_running=len(self._running), tokens_generated=self._tokens_generated,
            tokens_interrupted=self._tokens_interrupted, num_updates=holder.num_updates if holder else 0,
            update_s=holder.update_s if holder else 0.0, idle_s=idle,
            reward_busy_s=rewards.busy_s if rewards else 0.0, rewards_killed=rewards.num_killed if rewards else 0,
            rewards_failed=rewards.num_failed if rewards else 0)
        return Heartbeat(holder.held if holder else None, holder.fetching if holder else None, status)

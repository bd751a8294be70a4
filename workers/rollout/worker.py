"""The rollout worker: generates without ever waiting for training.

    coordinator --Leases--> one task a lease: wait for the lease's version, run the workflow --GroupFinished--> coordinator
    coordinator --version-> weight holder: pause, load, continue (tokens so far are kept)
    engine (child process) <--HTTP-- sampler          reward pool (child processes) <--pipes-- workflow

Who waits for whom: nothing here waits for training; leases wait for their version only (lease_runner.py). Whatever ends
first (the run, the engine, the coordinator, a signal) ends all the rest, in `work`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path

from tokenizers import Tokenizer

from workers.config import Config
from workers.messages.types import (
    Acknowledged,
    Announcement,
    Credit,
    Heartbeat,
    Leases,
    Message,
    Refused,
    Role,
    Version,
    Welcome,
    WorkerFailed,
    WorkerStatus,
)
from workers.processes import OUT_OF_TIME, TOLD_TO_END, first_cause
from workers.reward.pool import RewardPool
from workers.rollout.engine_client import EngineClient, EngineError
from workers.rollout.lease_runner import ENGINE_EXIT_S, LeaseRunner
from workers.rollout.sampler import Sampler
from workers.rollout.servers.process import ServerProcess
from workers.rollout.weight_updates import WeightHolder
from workers.rollout.workflows.single_turn import SingleTurn
from workers.rundir import RunFolder
from workers.transport.peer import Peer


class WorkerEnded(RuntimeError):
    """Something that this worker cannot live without has ended."""


class RolloutWorker:
    """One replica: an engine, a reward pool, and the leases it holds."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self.run, self.config = run, config
        self._newest: Announcement | None = None
        self._holder: WeightHolder | None = None
        self._rewards: RewardPool | None = None
        self._leases: LeaseRunner | None = None
        self._peer: Peer | None = None
        self._credit_due = asyncio.Event()

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
        server = ServerProcess(config.engine, model, self.run.jobs / f"engine-{os.getpid()}.log")
        engine: EngineClient | None = None
        try:
            engine = await server.start(Version(0, 0))
            self._holder = holder = WeightHolder(engine, config.engine.interrupt, peer.beat)
            if self._newest is not None:
                holder.announce(self._newest)
            async with RewardPool(config.reward) as self._rewards:
                sampler = Sampler(engine, Tokenizer.from_file(str(model / "tokenizer.json")), lambda: holder.num_pauses)
                workflow = SingleTurn(sampler, self._rewards, config.workflow, config.reward, config.engine.context_length)
                self._leases = leases = LeaseRunner(peer.send, workflow, holder, server)
                try:
                    await self._serve_leases(peer, server, holder, leases)
                finally:
                    await leases.abandon()
        finally:
            if engine is not None:
                await engine.close()
            await server.stop()

    async def _serve_leases(self, peer: Peer, server: ServerProcess, holder: WeightHolder, leases: LeaseRunner) -> None:
        async def lease_breaks() -> None:
            await leases.broken

        try:
            async with asyncio.TaskGroup() as tasks:
                for part in (holder.follow(), leases.resend(), self._give_credit(peer, leases), self._engine_exits(server), lease_breaks()):
                    tasks.create_task(part)
        except* EngineError as errors:
            # What failed was a call to the engine; if that is because the engine died, its death is the cause.
            if (how := await server.exited_within(ENGINE_EXIT_S)) is not None:
                raise WorkerEnded(how) from errors
            raise

    async def _give_credit(self, peer: Peer, leases: LeaseRunner) -> None:
        """Credit at the first welcome, and whenever the coordinator has forgotten us and taken us in anew.

        Half as much again as there are slots: the engine always has a request at hand when one ends.
        """
        slot = -1
        while True:
            await self._credit_due.wait()
            self._credit_due.clear()
            if slot == peer.slot:
                continue
            slot, size = peer.slot, self.config.workflow.group_size
            capacity = max(size, self.config.engine.num_slots * 3 // 2 // size * size)
            if capacity > leases.num_samples:
                await peer.send(Credit(capacity - leases.num_samples))

    async def _engine_exits(self, server: ServerProcess) -> None:
        raise WorkerEnded(await server.exited())

    # -- messages ------------------------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._credit_due.set()
            case Leases() if self._leases is not None:
                for lease in message.leases:
                    self._leases.start(lease)
            case Acknowledged() if self._leases is not None:
                self._leases.acknowledged(message.group_id, message.attempt)
            case Refused():
                print(f"the coordinator refused a message: {message.reason}", flush=True)

    def _on_announcement(self, announcement: Announcement) -> None:
        self._newest = announcement
        if self._holder is not None:
            self._holder.announce(announcement)

    # -- heartbeat -----------------------------------------------------------------------------------------------------

    def _heartbeat(self) -> Heartbeat:
        holder, rewards, leases = self._holder, self._rewards, self._leases
        if holder is None or leases is None:
            return Heartbeat(None, None, WorkerStatus(waiting_for="its engine to start"))
        waiting = "weights" if holder.held is None else "" if leases.num_running else "leases"
        status = WorkerStatus(
            waiting_for=waiting, num_running=leases.num_running, tokens_generated=leases.tokens_generated,
            tokens_interrupted=leases.tokens_interrupted, num_updates=holder.num_updates, update_s=holder.update_s, idle_s=leases.idle_s,
            reward_busy_s=rewards.busy_s if rewards else 0.0, rewards_killed=rewards.num_killed if rewards else 0,
            rewards_failed=rewards.num_failed if rewards else 0)
        return Heartbeat(holder.held, holder.fetching, status)

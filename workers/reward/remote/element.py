"""A reward element (`reward.placement=array`): judges for rollout workers on other nodes, with the same pool that a rollout worker has.

    rollout workers --ScoreWanted, OutputWanted--> [ service.py --> pool.py --> processes ] --answers--> rollout workers
    coordinator <--Register (where it serves), heartbeats-- this element        coordinator --RewardElements--> rollout workers

Who waits for whom: nobody waits for this element alone; while none is there rollout workers wait, and say so. One that must leave tells the
coordinator first, so that nothing new is asked of it, and answers what it has begun; what it does not is asked elsewhere.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from workers.config import ClusterKind, Config
from workers.config.judge import JUDGE
from workers.messages.from_coordinator import Drain, Refused, Welcome
from workers.messages.from_worker import Draining, Heartbeat, WorkerFailed
from workers.messages.judging import ToElement
from workers.messages.parts import Message, Role, WorkerStatus
from workers.reward.pool.pool import RewardPool, functions
from workers.reward.remote.service import RewardService
from workers.run.folder import RunFolder
from workers.run.processes import OUT_OF_TIME, TOLD_TO_END, first_cause
from workers.slurm.termination import Termination, Told, WorkerEnded, drain_limit_s, listen, slurm_job
from workers.transport.client import NoCoordinator, RunOver
from workers.transport.element_sockets import ElementSocket
from workers.transport.peer import START_TIMEOUT_S, Peer


class RewardElement:
    """One element: a pool of processes, the socket it is asked by, and its standing with the coordinator."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self.run, self.config = run, config
        self._on_slurm = config.cluster.kind is ClusterKind.slurm
        self._pool = RewardPool(config.reward, config.sandbox)
        self._service: RewardService | None = None
        self._peer: Peer | None = None
        self._told: asyncio.Future[Told] | None = None
        self._welcomed = asyncio.Event()

    @property
    def in_touch(self) -> bool:
        """Whether the coordinator knows us and is heard."""
        return self._peer is not None and self._peer.in_touch

    async def work(self) -> Termination:
        """Judge until the run is over, or until told to leave. Raises `VerifierError`, `CoordinatorLost` or what broke."""
        self._told = listen(self.config.cluster)
        async with self._pool as pool:
            socket = ElementSocket(self.run, self.config.transport, ToElement)
            self._service = RewardService(socket, pool)
            idle_s = self.config.rollout.max_idle_minutes * 60
            self._peer = Peer(
                self.run, self.config.transport, Role.reward, idle_s, heartbeat=self._heartbeat, on_message=self._on_message,
                on_announcement=lambda _: None, job=slurm_job(), serves=socket.endpoint, follows=self._on_slurm,
                start_timeout_s=idle_s if self._on_slurm else START_TIMEOUT_S)
            try:
                return await self._serve(self._service, self._peer, self._told)
            except (RunOver, NoCoordinator) as error:
                if not self._on_slurm:
                    raise
                return Termination("finished", error.cause) if isinstance(error, RunOver) else Termination("idle", str(error))
            finally:
                await self._service.close()
                await self._peer.leave()

    async def _serve(self, service: RewardService, peer: Peer, told: asyncio.Future[Told]) -> Termination:
        """Serve until something ends that, then leave in the way that this calls for. Raises what broke."""
        standing = asyncio.create_task(self._stand(peer))
        parts: list[asyncio.Future[Any]] = [standing, asyncio.create_task(service.serve()), asyncio.create_task(self._check())]
        waited: set[asyncio.Future[Any]] = {told, *parts}
        try:
            while not (told.done() or standing.done()):
                done, waited = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                for part in done - {told}:
                    part.result()  # raises what broke; that the check is done is no end
            if standing.done():
                return Termination("finished", standing.result())
            ending = self._told_ending(told.result())
            peer.parting = ending.cause
            if peer.in_touch:
                await peer.send(Draining(ending.cause))
                await peer.beat()
            await service.finish(told.result().limit_s)
            return ending
        except (RunOver, NoCoordinator):
            raise
        except BaseException as error:
            if peer.in_touch:
                await peer.send(WorkerFailed(first_cause(error)))
            raise
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _stand(self, peer: Peer) -> str:
        await peer.connect()
        return await peer.serve()

    async def _check(self) -> None:
        """Have what this node will be asked for tried at once, so that a node that lacks something tells the coordinator so."""
        await self._welcomed.wait()
        for function in functions(self.config):
            if function != JUDGE:  # which rollout workers ask
                await self._pool.load(function)

    def _told_ending(self, told: Told) -> Termination:
        """What `told` leads to. Raises `WorkerEnded` on one machine, where nobody would take over."""
        if told.signal is not None and not self._on_slurm:
            raise WorkerEnded(f"the reward element ended: {TOLD_TO_END if told.signal == signal.SIGTERM else OUT_OF_TIME}")
        return Termination("drained", told.reason, told.signal)

    def _on_message(self, message: Message) -> None:
        match message:
            case Welcome():
                self._welcomed.set()
            case Drain() if self._told is not None and not self._told.done():
                self._told.set_result(Told(message.reason, drain_limit_s(self.config.cluster, None)))
            case Refused():
                print(f"the coordinator refused a message: {message.reason}", flush=True)

    def _heartbeat(self) -> Heartbeat:
        pool, num_requests = self._pool, self._service.num_requests if self._service else 0
        num_refused, num_malformed = self._service.refused if self._service else (0, 0)
        return Heartbeat(status=WorkerStatus(
            waiting_for="" if num_requests else "requests", num_running=num_requests - pool.num_waiting, reward_busy_s=pool.busy_s,
            rewards_killed=pool.num_killed, rewards_failed=pool.num_failed, rewards_late=pool.num_late,
            rewards_waiting=pool.num_waiting, rewards_wait_s=pool.wait_s,
            num_refused=num_refused, num_malformed=num_malformed))

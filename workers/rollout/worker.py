"""The rollout worker: generates without ever waiting for training.

    coordinator --Leases--> one task a lease: run the workflow --> results --> coordinator
    coordinator --version-> weight holder: fetch; then engine by engine: pause, load, continue (tokens so far are kept)
    engines (child processes) <--HTTP-- sampler          reward pool (child processes) <--pipes-- workflow

Who waits for whom: nothing here waits for training; leases wait for an engine with their version and room for them (engines/engine_pool.py). Whatever
ends first (the run, an engine for good, the coordinator, a signal) ends all the rest, in `work`. While no coordinator is in touch the
worker finishes what it runs, keeps the results, and hands them to the next one.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from workers.config import ClusterKind, Config
from workers.messages.broadcasts import Broadcast, BroadcastRefused, JoinUpdateGroup, LeaveUpdateGroup, PrepareBroadcast
from workers.messages.from_coordinator import Acknowledged, Drain, Leases, LoadGranted, Refused, RewardElements, Sources, Welcome
from workers.messages.from_worker import Draining, Heartbeat, WorkerFailed
from workers.messages.parts import Announcement, HeldLease, Message, Role, WorkerStatus
from workers.model.architecture import read_architecture
from workers.reward.pool.pool import functions
from workers.reward.remote.client import RemoteRewards
from workers.reward.rewards import open_rewards
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.replica import spawner
from workers.rollout.engines.sampler import open_sampler
from workers.rollout.leases.drain import Holdings
from workers.rollout.leases.lease_runner import LeaseRunner
from workers.rollout.leases.outbox import Results
from workers.rollout.nodes.other_nodes import OtherNodes, place_here
from workers.rollout.weights.broadcast import GroupMember, membership
from workers.rollout.weights.fetch import WeightFetch
from workers.rollout.weights.updates import WeightHolder
from workers.rollout.worker_status import worker_status
from workers.rollout.workflows.group_filter import GroupFilter
from workers.rollout.workflows.rendering import text_of, texts_of_parts
from workers.rollout.workflows.workflow import Parts, Workflow
from workers.run.folder import RunFolder
from workers.run.processes import OUT_OF_TIME, TOLD_TO_END, first_cause
from workers.slurm.termination import Termination, Told, WorkerEnded, drain_limit_s, listen, slurm_job
from workers.transport.client import NoCoordinator, RunOver
from workers.transport.peer import START_TIMEOUT_S, Peer


class RolloutWorker:
    """One replica: its engines, a reward pool, and the leases it holds."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self.run, self.config = run, config
        self._on_slurm = config.cluster.kind is ClusterKind.slurm
        self._others: OtherNodes
        self._fetch: WeightFetch
        self._holder: WeightHolder
        self._engines: Engines | None = None
        self._member: GroupMember | None = None
        self._rewards = open_rewards(run, config)
        self._peer: Peer | None = None
        self._holdings: Holdings | None = None
        self._told: asyncio.Future[Told] | None = None

    @property
    def in_touch(self) -> bool:
        """Whether the coordinator knows us and is heard."""
        return self._peer is not None and self._peer.in_touch

    async def work(self) -> Termination:
        """Work until the run is over, or until told to leave. Raises `WorkerEnded`, `CoordinatorLost` or what broke."""
        idle_s = self.config.rollout.max_idle_minutes * 60
        self._told = told = listen(self.config.cluster)
        architecture = read_architecture(Path(self.config.model.path))
        self._others = others = OtherNodes(self.run, self.config, place_here(self.config), self._tell)
        self._fetch = fetch = WeightFetch(self.run, self.config, self._send, self._trainer_lives, others.fetching)
        self._holder = WeightHolder(fetch, self._beat, self._trainer_lives, architecture)
        self._peer = peer = Peer(
            self.run, self.config.transport, Role.rollout, idle_s, heartbeat=self._heartbeat, on_message=self._on_message,
            on_announcement=self._on_announcement, leases=self._held, job=slurm_job(), serves=fetch.endpoint, follows=self._on_slurm,
            start_timeout_s=idle_s if self._on_slurm else START_TIMEOUT_S)
        self._holdings = holdings = Holdings(self.run, Results(peer))
        told.add_done_callback(lambda _: holdings.closing())
        connecting = asyncio.create_task(peer.connect())
        first: set[asyncio.Future[Any]] = {connecting, told}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if connecting.done():
                connecting.result()
                ending = await self._work(peer, holdings, told)
            else:
                ending = self._told_ending(told.result())
            if isinstance(ending, Termination):
                return ending
            raise ending
        except (RunOver, NoCoordinator) as error:
            if not self._on_slurm:
                raise
            return Termination("finished", error.cause) if isinstance(error, RunOver) else Termination("idle", str(error))
        finally:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await others.close()
            await fetch.close()
            await peer.leave()

    async def _work(self, peer: Peer, holdings: Holdings, told: asyncio.Future[Told]) -> Termination | BaseException:
        """Run all parts until the first one ends, then end the rest in the way that this calls for; returns the error that ended it."""
        serving = asyncio.create_task(peer.serve())
        parts: list[asyncio.Future[Any]] = [
            serving, asyncio.create_task(self._operate(peer, holdings)), asyncio.create_task(holdings.results.deliver())]
        try:
            await asyncio.wait([*parts, told], return_when=asyncio.FIRST_COMPLETED)
            error = next((error for part in parts if part.done() and (error := part.exception()) is not None), None)
            if serving.done() and error is None:
                return await self._finish(holdings, serving)
            ending = error if error is not None and not told.done() else self._told_ending(told.result())
            if isinstance(ending, NoCoordinator) and self._on_slurm:
                await holdings.hand_over(drain_limit_s(self.config.cluster, None), serving)
            elif isinstance(ending, Termination):
                peer.parting = ending.cause
                await peer.send(Draining(ending.cause))
                await peer.beat()
                beats = peer.num_beats
                await holdings.hand_over(told.result().limit_s, serving, lambda: peer.num_replies >= beats or not peer.in_touch)
            else:
                await peer.send(WorkerFailed(first_cause(ending)))
                if self._on_slurm and not peer.in_touch:
                    holdings.spill()
            return ending
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _finish(self, holdings: Holdings, serving: asyncio.Task[str]) -> Termination:
        """The run is over. Where it may be resumed, and no coordinator has collected what we hold, that is written down."""
        cause, outcome = serving.result(), self.run.known_end()
        if cause and (outcome is None or outcome["state"] == "drained"):
            await holdings.hand_over(drain_limit_s(self.config.cluster, None), serving)
        return Termination("finished", cause)

    def _told_ending(self, told: Told) -> Termination | WorkerEnded:
        """What `told` leads to: on one machine, where nobody would take over, a signal is an error."""
        if told.signal is not None and not self._on_slurm:
            return WorkerEnded(f"the rollout worker ended: {TOLD_TO_END if told.signal == signal.SIGTERM else OUT_OF_TIME}")
        return Termination("drained", told.reason, told.signal)

    async def _operate(self, peer: Peer, holdings: Holdings) -> None:
        """Run engines, reward pool and leases until one of them breaks."""
        config, holder = self.config, self._holder
        self._engines = engines = Engines(config, spawner(self.run, config, self._others), lambda: holder.newest, self._changed)
        self._member = member = membership(config, engines.engines, holder, self._send)
        sampler = open_sampler(engines, Path(config.model.path), config.replayed)
        async with self._rewards:
            workflow = Workflow(Parts(sampler, self._rewards, config.workflow, config.reward, config.engine.context_length, text_of(config),
                                      config.transport.max_message_mb << 20, config.evaluation, texts_of_parts(config)))
            leases = LeaseRunner(holdings.results, workflow, GroupFilter(config.workflow.keep), engines)
            holdings.sampler, holdings.leases = sampler, leases

            async def lease_breaks() -> None:
                await leases.broken

            try:
                async with asyncio.TaskGroup() as tasks:
                    for part in (engines.live(), holder.follow(engines), lease_breaks(), self._check_node()):
                        tasks.create_task(part)
                    if member is not None:
                        holder.arriving = member.arriving
                        tasks.create_task(member.live())
            finally:
                await leases.abandon()

    async def _check_node(self) -> None:
        """Have what this node will be asked for tried at once, so that one that lacks something says so. Raises `VerifierError`."""
        for function in functions(self.config):
            await self._rewards.load(function)

    async def _changed(self) -> None:
        """What the engines hold has changed, or whether they take work."""
        if self._member is not None:
            self._member.look()
        await self._beat()

    def _trainer_lives(self) -> bool:
        """Whether the training job is there, as far as anybody knows; on one machine the run ends without it."""
        return self.in_touch or not self._on_slurm

    async def _send(self, message: Message) -> None:
        if self._peer is not None:
            await self._peer.send(message)

    async def _beat(self) -> None:
        if self._peer is not None:
            await self._peer.beat()

    # -- messages ------------------------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        assert self._holdings is not None
        results, leases = self._holdings.results, self._holdings.leases
        match message:
            case Welcome():
                results.send_again()
            case Leases() if leases is not None:
                for lease in message.leases:
                    leases.start(lease)
            case Acknowledged():
                results.acknowledged((message.group_id, message.attempt))
                if leases is not None and not message.accepted:
                    leases.give_up((message.group_id, message.attempt))
            case Drain():
                self._tell(message.reason)
            case RewardElements() if isinstance(self._rewards, RemoteRewards):
                self._rewards.listed(message.endpoints)
            case Sources() | LoadGranted():
                self._fetch.take(message)
            case JoinUpdateGroup() | LeaveUpdateGroup() | PrepareBroadcast() | Broadcast() | BroadcastRefused() if self._member is not None:
                self._member.take(message)
            case Refused():
                print(f"the coordinator refused a message: {message.reason}", flush=True)

    def _tell(self, reason: str) -> None:
        if self._told is not None and not self._told.done():
            self._told.set_result(Told(reason, drain_limit_s(self.config.cluster, None)))

    def _on_announcement(self, announcement: Announcement) -> None:
        self._fetch.announced(announcement)
        self._holder.announce(announcement)

    # -- heartbeat -----------------------------------------------------------------------------------------------------

    def _held(self) -> list[HeldLease]:
        if self._holdings is None:
            return []
        running = self._holdings.leases.held() if self._holdings.leases is not None else []
        return running + self._holdings.results.held()

    def _heartbeat(self) -> Heartbeat:
        holder, engines, leases = self._holder, self._engines, self._holdings.leases if self._holdings else None
        if engines is None or leases is None:
            return Heartbeat(fetching=holder.fetching, status=WorkerStatus(waiting_for="its start"), leases=self._held())
        leaving = self._told is not None and self._told.done()
        return Heartbeat(
            held=engines.held, fetching=holder.fetching, capacity=0 if leaving else engines.capacity, live=leases.num_live, leases=self._held(),
            status=worker_status(leaving, leases, engines, holder, self._fetch, self._rewards), tokens_in_flight=engines.tokens_in_flight,
            kv_tokens=engines.kv_tokens, update_ranks=0 if leaving or self._member is None else self._member.ranks)

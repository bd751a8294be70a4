"""A node of a replica over several, but the first: runs its part of the server, and brings weights to it, as the rollout worker says.

    rollout worker, on the first node (other_nodes.py)
        StartRank, StopRank --> the server's process here, one at a time --> RankEnded
        FetchVersion --> this node's store, or shared storage seen and verified --> VersionFetched
        Leave, or silence for transport.heartbeat_timeout_s --> this task ends, and what it has started with it

It decides nothing: signals and the end of the run are the rollout worker's to handle, which has this much time (`drain_limit_s`) to say so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from workers.config import Config, ConfigError, Transport
from workers.messages.codec import MessageError
from workers.messages.engine_nodes import FetchVersion, Leave, NodeLives, RankEnded, StartRank, StopRank, ToNode, VersionFetched, WorkerLives
from workers.messages.from_coordinator import Sources
from workers.messages.parts import Message
from workers.rollout.engines.client import EngineError
from workers.rollout.engines.replica import local_devices
from workers.rollout.engines.servers.process import ServerProcess, Span
from workers.rollout.nodes.other_nodes import tell_whereabouts
from workers.rollout.weights.attempts import ZMQ, Attempts
from workers.rollout.weights.merging import Merging
from workers.rollout.weights.shared_storage import from_shared_storage
from workers.rollout.weights.streaming import Streaming
from workers.run.folder import RunFolder
from workers.slurm.job import Place
from workers.slurm.termination import listen
from workers.transport.addresses import address_of
from workers.transport.element_sockets import ElementSocket
from workers.weights.manifest import WeightsError

FIRST_S = 600.0
"""So long the rollout worker may take to say its first word: it starts at the same time."""
LOOK_S = 1.0


class EngineNode:
    """One life of such a task."""

    def __init__(self, run: RunFolder, config: Config, place: Place) -> None:
        self._run, self._config, self._place = run, config, place
        self._socket = ElementSocket(run, config.transport, ToNode)
        weights = not config.evaluates and config.weights.transport is not Transport.disk
        self._streaming = Streaming(run, config) if weights else None
        self._merging = Merging(run, config) if config.weights.adapter_only and not config.evaluates else None
        self._rank: asyncio.Task[None] | None = None
        self._fetch: asyncio.Task[None] | None = None
        self._number = -1

    async def work(self) -> None:
        """Do what the rollout worker says until it leaves, or has been silent for too long."""
        try:
            tell_whereabouts(self._run, self._place, self._socket.endpoint)
            await self._serve()
        finally:
            for task in filter(None, (self._rank, self._fetch)):
                task.cancel()
                await _to_its_end(task)
            for part in (self._streaming, self._merging):
                if part is not None:
                    await asyncio.to_thread(part.close)
            self._socket.close()

    async def _serve(self) -> None:
        told = listen(self._config.cluster)
        receiving = asyncio.ensure_future(self._socket.receive())
        silent_s, limit_s = 0.0, FIRST_S
        try:
            while silent_s < limit_s:
                await asyncio.wait([receiving], timeout=LOOK_S)
                for task in filter(None, (self._rank, self._fetch)):
                    if task.done() and not task.cancelled():
                        task.result()  # what nobody has foreseen ends this task: the rollout worker sees that the node is lost
                if told.done():
                    limit_s = min(limit_s, told.result().limit_s)
                if not receiving.done():
                    silent_s += LOOK_S  # not by the clock: while this process is suspended itself, nobody is silent
                    continue
                with contextlib.suppress(MessageError):
                    peer, message = receiving.result()
                    silent_s, limit_s = 0.0, self._config.transport.heartbeat_timeout_s
                    if isinstance(message, Leave):
                        return
                    await self._take(peer, message)
                receiving = asyncio.ensure_future(self._socket.receive())
            print(f"the rollout worker of this replica has said nothing for {limit_s:g} s: this node leaves", flush=True)
        finally:
            receiving.cancel()

    async def _take(self, peer: bytes, message: Message) -> None:
        match message:
            case WorkerLives():
                await self._socket.send(peer, NodeLives())
            case StartRank():
                self._number = message.number
                self._rank = asyncio.create_task(self._after(self._rank, self._run_rank(peer, message)))
            case StopRank() if self._rank is not None and message.number == self._number:
                self._rank.cancel()
            case FetchVersion():
                self._fetch = asyncio.create_task(self._after(self._fetch, self._bring(peer, message)))

    @staticmethod
    async def _after(earlier: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
        """`work`, once what was done before has been ended."""
        try:
            if earlier is not None:
                earlier.cancel()
                await _to_its_end(earlier)
        except BaseException:
            work.close()
            raise
        await work

    async def _run_rank(self, peer: bytes, start: StartRank) -> None:
        place, config = self._place, self._config
        log = self._run.jobs / f"engine-{place.name}.node-{place.rank}.log"
        span = Span(place.world_size, place.rank, start.address, start.port, address_of(config.transport.interface))
        try:
            devices = local_devices(self._run, config, place.world_size)
        except ConfigError as error:
            await self._socket.send(peer, RankEnded(start.number, str(error)))
            return
        process = ServerProcess(config.engine, Path(config.model.path), log, None if devices is None else ",".join(devices), span,
                                config.replayed is not None)
        try:
            await process.launch(start.version)
            how = await process.exited()
        except EngineError as error:
            how = str(error)
        finally:
            await _to_its_end(asyncio.ensure_future(process.stop()))
        print(how, flush=True)
        await self._socket.send(peer, RankEnded(start.number, how))

    async def _bring(self, peer: bytes, wanted: FetchVersion) -> None:
        announcement, cause = wanted.announcement, ""
        try:
            if wanted.source and self._streaming is not None:
                folder = await self._stream(self._streaming, wanted)
            else:
                folder = await from_shared_storage(announcement, self._config.weights.timeout_s, lambda: True)
                if self._streaming is not None:
                    await asyncio.to_thread(self._streaming.came_otherwise, announcement.version)
            if self._merging is not None:
                self._merging.held = wanted.held
                await self._merging.merge(announcement.version, folder)
        except WeightsError as error:
            cause = str(error)
        await self._socket.send(peer, VersionFetched(wanted.number, cause))


    async def _stream(self, streaming: Streaming, wanted: FetchVersion) -> Path:
        """The version from the worker's own node, which is asked again while it may still get it. Raises `WeightsError`."""
        announcement, streaming.held = wanted.announcement, wanted.held
        tried = Attempts(announcement.version, self._config.weights.timeout_s, streaming.arrived, time.monotonic())
        while True:
            streaming.expect(announcement.version)
            try:
                return await streaming.fetch(announcement, Sources(announcement.version, [wanted.source]), lambda _: None)
            except WeightsError as error:
                tried.failed(ZMQ, error, streaming.arrived, time.monotonic())
                if not tried.once_more():
                    raise
            await asyncio.sleep(self._config.transport.heartbeat_s)


async def _to_its_end(task: asyncio.Future[Any]) -> None:
    """Wait until `task` has ended, however it does, and even where this is cancelled meanwhile: that counts afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def run_node(run: RunFolder, config: Config, place: Place) -> str:
    """The life of such a task; its rollout worker says why the run has ended."""
    try:
        node = EngineNode(run, config, place)
    except (ConfigError, OSError) as error:
        tell_whereabouts(run, place, "", str(error))
        raise
    asyncio.run(node.work())
    return ""

"""The other nodes of a replica that is too large for one: what the rollout worker, which runs on the first, has them do.

    each other task of the element --where it is asked--> run folder (rendezvous/) --> a connection for as long as both live
        WorkerLives --every transport.heartbeat_s--> NodeLives                     silent for heartbeat_timeout_s: it is lost, and the worker goes
        StartRank --> its part of the server runs --> RankEnded                    the server is started again, on all nodes (spread_server.py)
        FetchVersion --> weights on its node, from this one --> VersionFetched     with this node's own fetch (weights/fetch.py)

A connection that breaks is made again; what was under way over it has failed. A node that is lost is not replaced within the element: the worker
hands its samples over, and leaves; the element that follows gets whole nodes from SLURM.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec

from workers.config import ClusterKind, Config
from workers.messages.codec import MessageError
from workers.messages.engine_nodes import FetchVersion, FromNode, Leave, NodeLives, RankEnded, StartRank, StopRank, VersionFetched, WorkerLives
from workers.messages.parts import Announcement, Message, Version
from workers.rollout.engines.servers.spread_server import Start
from workers.rollout.weights.fetch import WeightsSuperseded
from workers.run.files import write_once
from workers.run.folder import RunFolder
from workers.slurm import job
from workers.slurm.job import Place
from workers.transport.addresses import address_of
from workers.transport.door import PortError
from workers.transport.element_sockets import ElementLink, ElementLinks, LinkLost
from workers.weights.manifest import WeightsError

LOOK_S = 0.5
LINGER_MS = 2000


class NodeLost(ConnectionError):
    """What a node was asked will not be answered."""


class Whereabouts(msgspec.Struct, frozen=True):
    """Where a node is asked, and its name; or `cause`: why it is not there."""

    endpoint: str
    host: str
    cause: str = ""


def place_here(config: Config) -> Place | None:
    """This task's place among those of its element, one on each node of its replica; None where the replica has one node."""
    spread = config.cluster.kind is ClusterKind.slurm and int(os.environ.get("SLURM_NTASKS", 1)) > 1
    return job.current() if spread else None


def tell_whereabouts(run: RunFolder, place: Place, endpoint: str, cause: str = "") -> None:
    """Say where this node is asked, or why it is not there."""
    write_once(run.rendezvous / _name(place, place.rank), msgspec.json.encode(Whereabouts(endpoint, socket.gethostname(), cause)))


def _name(place: Place, rank: int) -> str:
    return f"node.{place.job}.{place.restarts}.{rank}.json"


class OtherNodes:
    """All nodes of this worker's replica but its own; it has none where `place` is None. `lost` is told which node is lost, and how."""

    def __init__(self, run: RunFolder, config: Config, place: Place | None, lost: Callable[[str], None]) -> None:
        self._config, self._lost = config.transport, lost
        self._links = ElementLinks(run, config.transport, FromNode)
        self._nodes = [_Node(run, config, place, rank, self._links) for rank in range(1, place.world_size)] if place else []
        self._living = [asyncio.create_task(self._live(node)) for node in self._nodes]

    async def _live(self, node: _Node) -> None:
        try:
            how = await node.live()
        except (msgspec.MsgspecError, OSError) as error:
            how = f"cannot be talked with: {error}"
        self._lost(f"{node.name} of this replica {how}")

    @property
    def number(self) -> int:
        """How many nodes the replica has, this one among them."""
        return 1 + len(self._nodes)

    @property
    def missing(self) -> str:
        """Which of them are not there, in words; '' if all are."""
        return ", ".join(f"{node.name} is not there" for node in self._nodes if node.link is None)

    def reserve(self) -> socket.socket:
        """A socket bound to a free port of this node's address, which does not listen. Others may bind that port, if they ask to share it."""
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        ports = list(self._config.ports() or (0,))
        random.shuffle(ports)  # others look from the first one on, and are not kept from one that does not listen
        for port in ports:
            with contextlib.suppress(OSError):
                reserved.bind((address_of(self._config.interface), port))
                return reserved
        reserved.close()
        raise PortError(f"transport.port_range={self._config.port_range!r}: no port of it is free for a server over several nodes. Widen the range")

    async def run_rank(self, rank: int, start: Start) -> str:
        """Have the server's part run on node `rank` until cancelled; returns how it ended, if it does."""
        return await self._nodes[rank - 1].run_rank(start)

    @asynccontextmanager
    async def fetching(self, announcement: Announcement, source: str, held: Version | None) -> AsyncIterator[None]:
        """Have the announced weights come to all of them while the block runs, by its end; as `FetchVersion`. Raises `WeightsError`, and
        `WeightsSuperseded` where a node is lost."""
        fetches = [asyncio.create_task(node.fetch(announcement, source, held)) for node in self._nodes]
        try:
            yield
            await asyncio.gather(*fetches)
        finally:
            for fetch in fetches:
                fetch.cancel()
            await asyncio.gather(*fetches, return_exceptions=True)

    async def close(self) -> None:
        """Have them leave."""
        for task in self._living:
            task.cancel()
        await asyncio.gather(*self._living, return_exceptions=True)
        self._links.close()


class _Node:
    """One of them. `link`: None while it is not there."""

    def __init__(self, run: RunFolder, config: Config, place: Place, rank: int, links: ElementLinks) -> None:
        self.name = f"node {rank}"
        self.link: ElementLink | None = None
        self._file = run.rendezvous / _name(place, rank)
        self._beat_s, self._limit_s = config.transport.heartbeat_s, config.transport.heartbeat_timeout_s
        self._links, self._numbers, self._silent_s = links, itertools.count(), 0.0
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._there = asyncio.Event()
        self._is_lost = False

    async def live(self) -> str:
        """Keep the connection until the node is lost; returns how. When cancelled, the node is told to leave."""
        where = await self._found()
        self.name = f"{self.name} ({where.host})"
        try:
            while not where.cause:
                how = await self._converse(self._links.open(where.endpoint))
                if self._silent_s > self._limit_s:
                    return f"has given no sign of life for {self._limit_s:g} s (transport.heartbeat_timeout_s): {how}"
                await asyncio.sleep(self._beat_s)
                self._silent_s += self._beat_s
            return f"could not begin: {where.cause}"
        finally:
            self._is_lost = True
            self._there.set()

    async def _found(self) -> Whereabouts:
        while True:
            with contextlib.suppress(OSError):
                # A listing, because shared file systems cache missing names.
                if self._file.name in os.listdir(self._file.parent):
                    return msgspec.json.decode(self._file.read_bytes(), type=Whereabouts)
            await asyncio.sleep(LOOK_S)

    async def _converse(self, link: ElementLink) -> str:
        """Talk over a connection until it breaks; returns how."""
        receiving = asyncio.create_task(self._receive(link))
        try:
            while not receiving.done() and self._silent_s <= self._limit_s:
                await link.send(WorkerLives())
                await asyncio.wait([receiving], timeout=self._beat_s)
                self._silent_s += self._beat_s
            return receiving.result() if receiving.done() else "it is silent"
        except LinkLost as error:
            return str(error)
        except asyncio.CancelledError:
            with contextlib.suppress(LinkLost):
                await link.send(Leave())
            raise
        finally:
            self.link = None
            self._there.clear()
            receiving.cancel()
            link.close(LINGER_MS)
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(NodeLost("the connection is gone"))

    async def _receive(self, link: ElementLink) -> str:
        while True:
            try:
                message = await link.receive()
            except (LinkLost, MessageError) as error:
                return str(error)
            self._silent_s = 0.0
            if isinstance(message, NodeLives):
                self.link = link
                self._there.set()
            elif isinstance(message, RankEnded | VersionFetched) and (answer := self._answers.get(message.number)) and not answer.done():
                answer.set_result(message.cause)

    async def _ask(self, number: int, request: Message) -> str:
        """What is answered, once the node is there. Raises `NodeLost`."""
        await self._there.wait()
        if self.link is None:
            raise NodeLost("it is gone")
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self.link.send(request)
            return await answer
        except LinkLost as error:
            raise NodeLost(str(error)) from error
        finally:
            del self._answers[number]

    async def run_rank(self, start: Start) -> str:
        """As `OtherNodes.run_rank`."""
        number = next(self._numbers)
        try:
            how = await self._ask(number, StartRank(number, start.address, start.port, start.version))
            return f"on {self.name}: {how}"
        except NodeLost as error:
            return f"{self.name} of this replica is lost: {error}"
        except asyncio.CancelledError:
            if self.link is not None:
                with contextlib.suppress(LinkLost):
                    await self.link.send(StopRank(number))
            raise

    async def fetch(self, announcement: Announcement, source: str, held: Version | None) -> None:
        """As `OtherNodes.fetching`; once more where the connection breaks meanwhile."""
        while not self._is_lost:
            number = next(self._numbers)
            try:
                cause = await self._ask(number, FetchVersion(number, announcement, source, held))
            except NodeLost:
                await asyncio.sleep(self._beat_s)  # the link may be gone, and not be seen to be
                continue
            if not cause:
                return
            raise WeightsError(f"{self.name} of this replica has not got version {announcement.version}: {cause}")
        raise WeightsSuperseded(f"{self.name} of this replica is lost: this worker leaves")

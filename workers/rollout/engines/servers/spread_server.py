"""A server over several nodes: one process on each of them, which meet at an address of the first.

    first node  SpreadServer.start --a fresh port--> its own process, and by `Nodes.run_rank` those of the other nodes --> it answers: all are there
    any of them ends, or its node is lost --> the whole server has ended: Engine.live starts it again, and its samples go on
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.config import EngineConfig
from workers.messages.parts import Version
from workers.rollout.engines.client import EngineClient
from workers.rollout.engines.servers.process import ServerProcess, Span

TOGETHER_S = 1.0


@dataclass(frozen=True)
class Start:
    """What the processes of one start have in common: they meet at `address`:`port`, and name their weights `version`."""

    address: str
    port: int
    version: Version


class Nodes(Protocol):
    """The other nodes of this replica (rollout/nodes/other_nodes.py)."""

    @property
    def number(self) -> int:
        """How many nodes the replica has, this one among them."""

    @property
    def missing(self) -> str:
        """Which of them are not there, in words; '' if all are."""

    def reserve(self) -> socket.socket:
        """A socket bound to a free port of this node's address, which does not listen."""

    async def run_rank(self, rank: int, start: Start) -> str:
        """Have the server's part run on node `rank` until cancelled; returns how it ended, if it does."""


class SpreadServer(ServerProcess):
    """As any server: all of it starts, and ends, as one."""

    def __init__(self, nodes: Nodes, config: EngineConfig, model_folder: Path, log: Path, devices: str | None, tells_routing: bool = False) -> None:
        super().__init__(config, model_folder, log, devices, tells_routing=tells_routing)
        self._nodes, self._ranks = nodes, list[asyncio.Task[str]]()
        self._reserved = nodes.reserve()

    @property
    def _name(self) -> str:
        missing = self._nodes.missing
        return f"{super()._name} over {self._nodes.number} nodes" + (f" ({missing})" if missing else "")

    async def start(self, version: Version) -> EngineClient:
        """As `ServerProcess.start`; the other nodes' processes are started at the same time."""
        address, port = self._reserved.getsockname()
        self.span = Span(self._nodes.number, 0, address, port, address)
        start = Start(address, port, version)
        self._ranks = [asyncio.create_task(self._nodes.run_rank(rank, start)) for rank in range(1, self._nodes.number)]
        return await super().start(version)

    async def exited(self) -> str:
        """Wait until any process of it is gone; says how, and what else has gone at once: one that dies takes the others with it."""
        own = asyncio.create_task(super().exited())
        try:
            await asyncio.wait([own, *self._ranks], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([own, *self._ranks], timeout=TOGETHER_S)
            ends = [task.result().partition("; its log") for task in (own, *self._ranks) if task.done() and not task.cancelled()]
            return ", and ".join(end[0] for end in ends) + "".join(end[1] + end[2] for end in ends)
        finally:
            own.cancel()

    async def stop(self) -> None:
        """As `ServerProcess.stop`, on all nodes."""
        for rank in self._ranks:
            rank.cancel()
        await asyncio.gather(*self._ranks, return_exceptions=True)
        await super().stop()
        self._reserved.close()

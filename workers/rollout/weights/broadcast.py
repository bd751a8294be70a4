"""A worker's part in broadcasts of new weights (weights.transport=nccl). Who is in the group, and when: coordinator/weights/broadcast_group.py.

    JoinUpdateGroup   --> is the trainer to be reached, is its NCCL ours? --> all servers join, lane after lane ------------> UpdateGroupJoined
    PrepareBroadcast  --> each server: pause, all of them stand still -----------------------------------> BroadcastReady
    Broadcast         -->              begin, bucket after bucket, end, continue: it holds the version --> Heartbeat (held)
    BroadcastRefused  -->              continue, as if nothing had been
    LeaveUpdateGroup  --> all servers leave

A server that fails in the middle takes no work until it has been given the whole version from a folder; it is fetched as it would be
without broadcasts (updates.py). What goes wrong in the group is told, and ends the group (UpdateGroupBroken).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

from workers.config import Config, Server, Transport
from workers.messages.broadcasts import (
    Broadcast,
    BroadcastReady,
    BroadcastRefused,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    PrepareBroadcast,
    UpdateGroupBroken,
    UpdateGroupJoined,
)
from workers.messages.parts import Message, Version
from workers.model.architecture import read_architecture
from workers.rollout.engines.client import EngineClient
from workers.rollout.engines.engine import Engine
from workers.rollout.weights import group_calls, nccl
from workers.transport.addresses import address_of, interface_of, reach

REACH_S = 5.0
GO_S = 15.0
"""A little more than the coordinator waits for all workers to stand still."""


class Holder(Protocol):
    """What is told of the versions that came (updates.py)."""

    def received(self, version: Version) -> None:
        """All servers have got it."""

    def look_again(self) -> None:
        """A server lacks the newest version."""


def membership(config: Config, engines: list[Engine], holder: Holder, send: Callable[[Message], Awaitable[None]]) -> GroupMember | None:
    """This worker's part in broadcasts; None where weights do not travel by them. To be made before the servers are started."""
    if config.weights.transport is not Transport.nccl:
        return None
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # servers inherit it
        os.environ.setdefault(variable, interface_of(address_of(config.transport.interface)))
    return GroupMember(config, engines, holder, read_architecture(Path(config.model.path)).tensor_shapes(), send)


class GroupMember:
    """What the servers of this worker do in groups, while `live` runs. `send`: to the coordinator; `shapes`: of all tensors of the model."""

    def __init__(self, config: Config, engines: list[Engine], holder: Holder, shapes: Mapping[str, tuple[int, ...]],
                 send: Callable[[Message], Awaitable[None]]) -> None:
        self._config, self._engines, self._holder, self._shapes, self._send = config, engines, holder, shapes, send
        self._ranks_each = config.engine.parallel.tp
        self._joined: JoinUpdateGroup | None = None
        self._clients: list[EngineClient] = []
        self._go: asyncio.Future[bool] | None = None
        self._turn = asyncio.Lock()
        self._idle = asyncio.Event()
        self._idle.set()
        self._tasks: asyncio.TaskGroup | None = None
        self._nccl: asyncio.Task[str] | None = None

    async def live(self) -> None:
        """Do what `take` is told, for as long as the worker runs."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            if self._config.engine.server is Server.sglang and self._config.engine.device != "cpu":
                self._nccl = tasks.create_task(nccl.version_of(self._config.engine.python))  # known before anybody is asked to join
            await asyncio.Event().wait()

    @property
    def ranks(self) -> int:
        """How many ranks this worker would have in a group, 0 while not all of its servers run."""
        return self._ranks_each * len(self._engines) if all(engine.client is not None for engine in self._engines) else 0

    async def arriving(self) -> None:
        """Return once no broadcast is under way here."""
        await self._idle.wait()

    def take(self, message: Message) -> None:
        """What the coordinator says about groups; anything else is ignored."""
        match message:
            case JoinUpdateGroup():
                self._begin(self._join(message))
            case LeaveUpdateGroup():
                self._decide(False)
                self._begin(self._leave(message.group))
            case PrepareBroadcast():
                self._begin(self._receive(message))
            case Broadcast():
                self._decide(True)
            case BroadcastRefused():
                self._decide(False)

    def look(self) -> None:
        """Servers have changed: one that was started again is in no group, and may lack what the others got by broadcast."""
        if self._joined is not None and not self._is_in(self._joined.group):
            self._begin(self._leave(self._joined.group, "a server has been started again"))
        if self._idle.is_set() and any(engine.client is not None and engine.held is None for engine in self._engines):
            self._holder.look_again()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None, "nobody is asked into a group before its servers run"
        self._tasks.create_task(work)

    def _decide(self, go: bool) -> None:
        if self._go is not None and not self._go.done():
            self._go.set_result(go)

    # -- being in a group ----------------------------------------------------------------------------------------------

    def _is_in(self, group: str) -> bool:
        same = [engine.client is client for engine, client in zip(self._engines, self._clients, strict=False)]
        return self._joined is not None and self._joined.group == group and all(same) and len(same) == len(self._engines)

    async def _join(self, message: JoinUpdateGroup) -> None:
        async with self._turn:
            await self._quit("")
            self._joined, self._clients = message, [engine.client for engine in self._engines if engine.client is not None]
            problem = await self._enter(message) if self._is_in(message.group) else "not all servers run"
            if unknown := [piece.name for bucket in message.buckets for piece in bucket.pieces if piece.name not in self._shapes]:
                problem = f"the trainer broadcasts {unknown[0]}, which this model does not have"
            if problem:
                await self._quit(problem)
            else:
                await self._send(UpdateGroupJoined(message.group))

    async def _enter(self, message: JoinUpdateGroup) -> str:
        """Have all servers join; returns what has gone wrong."""
        different = nccl.difference(message.library, await self._nccl if self._nccl else "") if message.library else ""
        problem = different or await reach(message.address, message.port, REACH_S)
        return problem or await group_calls.join(self._clients, message, self._ranks_each)

    async def _leave(self, group: str, cause: str = "") -> None:
        async with self._turn:
            if self._joined is not None and self._joined.group == group:
                await self._quit(cause)

    async def _quit(self, cause: str) -> None:
        """Leave the group, if there is one; a `cause` is told."""
        if self._joined is None:
            return
        left, clients = self._joined, self._clients
        self._joined, self._clients = None, []
        if cause:
            await self._send(UpdateGroupBroken(left.group, cause))
        current = [client for client in clients if any(engine.client is client for engine in self._engines)]
        await group_calls.leave(current, left)

    # -- broadcasts ----------------------------------------------------------------------------------------------------

    async def _receive(self, message: PrepareBroadcast) -> None:
        async with self._turn:
            if not self._is_in(message.group):
                await self._send(UpdateGroupBroken(message.group, "a server has been started again"))
                await self._quit("")
                return
            self._idle.clear()
            try:
                problem = await self._receive_all(message)
            finally:
                self._idle.set()
            if problem:
                await self._quit(problem)
                self.look()

    async def _receive_all(self, message: PrepareBroadcast) -> str:
        """Have all servers stand still, and take the version if it comes; returns what has gone wrong with the group."""
        assert self._joined is not None
        take = group_calls.taking(self._config, self._joined, message.version, self._shapes)
        go = self._go = asyncio.get_running_loop().create_future()
        num_still = 0

        async def stands_still() -> bool:
            nonlocal num_still
            num_still += 1
            if num_still == len(self._engines):
                await self._send(BroadcastReady(message.group, message.version))
            return await go

        receiving = [asyncio.ensure_future(engine.receive(message.version, stands_still, take)) for engine in self._engines]
        for task in receiving:
            task.add_done_callback(lambda _: self._decide(False))  # one that ends early has failed: the others go on
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GO_S):
                    await asyncio.shield(go)
            heard = go.done()
            self._decide(False)
            held = await asyncio.gather(*receiving)
        finally:
            for task in receiving:
                task.cancel()
        if all(held):
            self._holder.received(message.version)
            return ""
        if go.result() or not heard or num_still < len(self._engines):
            return f"version {message.version} has not arrived: " + ("nobody has said whether it comes" if not heard else "a server has failed")
        return ""

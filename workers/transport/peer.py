"""A worker's standing with the coordinator: register, heartbeat, announcements, the end of the run.

    Register -> Welcome            at start, and again whenever the coordinator says that it does not know us
    Heartbeat -> HeartbeatReply    every `heartbeat_s`; carries what we hold, brings the newest version
    VersionAnnounced (SUB)         the same, sooner
    Finish                         the run is over

Every wait has a limit: a coordinator that is silent while the run folder says that the run has ended, or for
`silence_s`, raises `CoordinatorLost` from `serve`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable

from workers.config import TransportConfig
from workers.messages.types import (
    Announcement,
    Finish,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Message,
    Refused,
    Register,
    Role,
    VersionAnnounced,
    Welcome,
)
from workers.rundir import RunFolder
from workers.transport.client import ClientSockets, CoordinatorLost, find_coordinator
from workers.transport.keys import read_keys

START_TIMEOUT_S = 120.0


class Peer:
    """One registered worker. `on_message` gets every Welcome and what is not handled here, `on_announcement` each newer version."""

    def __init__(self, run: RunFolder, config: TransportConfig, role: Role, silence_s: float, *, heartbeat: Callable[[], Heartbeat],
                 on_message: Callable[[Message], None], on_announcement: Callable[[Announcement], None]) -> None:
        self.run, self.config, self.role = run, config, role
        self.epoch = self.slot = 0
        self.finish_cause: str | None = None
        self._silence_s = silence_s
        self._heartbeat, self._on_message, self._on_announcement = heartbeat, on_message, on_announcement
        self._newest: Announcement | None = None
        self._finished = asyncio.Event()
        self._welcomed = asyncio.Event()
        self._heard = time.monotonic()

    async def __aenter__(self) -> Peer:
        address = await find_coordinator(self.run, START_TIMEOUT_S)
        server_public = read_keys(self.run, "server").public
        self.sockets = ClientSockets(self.config, address, server_public, read_keys(self.run, "client"))
        await self.register()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sockets.send(Goodbye())
        self.sockets.close()

    async def register(self) -> None:
        """Introduce ourselves; harmless to repeat."""
        await self.sockets.send(Register(self.role, socket.gethostname(), os.getpid()))

    async def send(self, message: Message) -> None:
        """Send to the coordinator."""
        await self.sockets.send(message)

    async def beat(self) -> None:
        """Send a heartbeat now, so that what changed is known at once."""
        await self.sockets.send(self._heartbeat())

    @property
    def in_touch(self) -> bool:
        """Whether the coordinator has taken us in and has been heard lately."""
        return self._welcomed.is_set() and time.monotonic() - self._heard < max(10.0, 3 * self.config.heartbeat_s)

    async def welcomed(self) -> None:
        """Wait until the coordinator has taken us in. Raises `CoordinatorLost` after `START_TIMEOUT_S`."""
        try:
            await asyncio.wait_for(self._welcomed.wait(), START_TIMEOUT_S)
        except TimeoutError as error:
            raise CoordinatorLost(f"the coordinator has not answered in {START_TIMEOUT_S:g} s. Look at the training job's log") from error

    def finish(self, cause: str) -> None:
        """Let `serve` return `cause`."""
        self.finish_cause = cause
        self._finished.set()

    async def serve(self) -> str:
        """Keep the standing until the run is over; returns its cause ('' is complete). Raises `CoordinatorLost`."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop()) for loop in (self._receive, self._subscribe, self._beat)]
            await self._finished.wait()
            for task in running:
                task.cancel()
        assert self.finish_cause is not None
        return self.finish_cause

    async def _receive(self) -> None:
        while True:
            message = await self.sockets.receive()
            self._heard = time.monotonic()
            match message:
                case Welcome():
                    self.slot, self.epoch = message.slot, message.epoch
                    self._welcomed.set()
                    self._announced(message.announcement)
                    self._on_message(message)
                case HeartbeatReply():
                    self._announced(message.announcement)
                    if not message.known:
                        await self.register()
                case Finish():
                    self.finish(message.cause)
                case Refused():
                    if not self._welcomed.is_set():
                        raise CoordinatorLost(f"the coordinator refused us: {message.reason}")
                    self._on_message(message)
                case _:
                    self._on_message(message)

    async def _subscribe(self) -> None:
        while True:
            message = await self.sockets.receive_published()
            if isinstance(message, VersionAnnounced):
                self._announced(message.announcement)

    async def _beat(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(self.config.heartbeat_s)
            silent = time.monotonic() - self._heard
            if silent > 3 * self.config.heartbeat_s and (outcome := self.run.ended()) is not None:
                self.finish(outcome["cause"])
            elif silent > self._silence_s:
                raise CoordinatorLost(f"the coordinator has been silent for {silent:.0f} s")

    def _announced(self, announcement: Announcement | None) -> None:
        if announcement is not None and (self._newest is None or announcement.version > self._newest.version):
            self._newest = announcement
            self._on_announcement(announcement)

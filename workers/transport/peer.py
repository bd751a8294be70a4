"""A worker's standing with the coordinator: register, heartbeat, announcements, the end of the run.

    Register -> Welcome            at start, and again whenever the coordinator says that it does not know us
    Heartbeat -> HeartbeatReply    every `heartbeat_s` (more, if told), and after a welcome; carries what we hold, brings the newest version
    VersionAnnounced (SUB)         the same, sooner
    Suspended                      this coordinator goes away, another one will come
    Finish                         the run is over

A peer that `follows` goes over to a newer coordinator as soon as the rendezvous has one: it looks there at every heartbeat while
its own is silent or suspended, and every `LOOK_S` otherwise, because one that was fenced off may still talk. It registers
there under its routing id, with the leases that it holds.

Every wait has a limit: a coordinator that is silent while the run folder says that the run has ended, or for
`silence_s`, ends `serve`. While this process is suspended itself, nobody is silent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable

import msgspec

from workers.config import TransportConfig
from workers.messages.from_coordinator import Finish, HeartbeatReply, Refused, Suspended, VersionAnnounced, Welcome
from workers.messages.from_worker import Goodbye, Heartbeat, Register
from workers.messages.parts import Announcement, HeldLease, Message, Role
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.run.own_pause import own_pause
from workers.transport.client import LINGER_MS, ClientSockets, CoordinatorLost, NoCoordinator, find_coordinator, new_routing_id
from workers.transport.keys import KeyPair, read_keys
from workers.transport.rendezvous import Address, newest

START_TIMEOUT_S = 120.0
LOOK_S = 10.0


class Peer:
    """One registered worker. `on_message` gets every Welcome and what is not handled here, `on_announcement` each newer version, and the
    same one again when it can be had in more ways.

    `leases`: what is held, for Register. `job`: the SLURM job. `serves`: where others fetch weights from this worker, '' for nowhere. `parting`: why
    it leaves before the run is over. `start_timeout_s`: how long to wait for the first one. `num_beats`, `num_replies`: sent, and answered."""

    def __init__(self, run: RunFolder, config: TransportConfig, role: Role, silence_s: float, *, heartbeat: Callable[[], Heartbeat],
                 on_message: Callable[[Message], None], on_announcement: Callable[[Announcement], None],
                 leases: Callable[[], list[HeldLease]] = list, job: str = "", serves: str = "", follows: bool = False,
                 start_timeout_s: float = START_TIMEOUT_S, min_epoch: int = 0) -> None:
        self.run, self.config, self.role = run, config, role
        self.num_beats = self.num_replies = 0
        self.finish_cause: str | None = None
        self.parting, self._min_epoch, self._routing_id = "", min_epoch, new_routing_id()
        self._silence_s, self._start_timeout_s, self._follows, self._job, self._serves = silence_s, start_timeout_s, follows, job, serves
        self._heartbeat, self._on_message, self._on_announcement, self._leases = heartbeat, on_message, on_announcement, leases
        self.sockets: ClientSockets
        self._keys: tuple[KeyPair, KeyPair]  # the server's, and the workers'
        self._address: Address | None = None
        self._newest: Announcement | None = None
        self._finished, self._welcomed = asyncio.Event(), asyncio.Event()
        self._suspended, self._leases_sent, self._heard, self._interval_s = False, 0, time.monotonic(), config.heartbeat_s

    async def __aenter__(self) -> Peer:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def connect(self) -> None:
        """Find the coordinator and register. Raises `NoCoordinator` after `start_timeout_s`, `RunOver` if the run is over."""
        self._keys = await asyncio.to_thread(patiently, self.run, lambda: (read_keys(self.run, "server"), read_keys(self.run, "client")))
        await self._connect(await find_coordinator(self.run, self._start_timeout_s, self._min_epoch))

    async def leave(self) -> None:
        """Say Goodbye, if there is anyone to say it to, and close."""
        if self._address is not None:
            await self.sockets.send(Goodbye(self.parting))
            self.sockets.close(linger_ms=0 if self._suspended else LINGER_MS)

    async def _connect(self, address: Address) -> None:
        sockets = ClientSockets(self.config, address, self._keys[0].public, self._keys[1], self._routing_id)
        if self._address is not None:  # what fails before leaves the old ones, by which it is told
            self.sockets.close(linger_ms=0)
        self.sockets = sockets
        self._address, self._suspended, self._leases_sent, self._heard, self.num_replies = address, False, 0, time.monotonic(), self.num_beats
        self._welcomed.clear()
        await self.register()

    async def register(self) -> None:
        """Introduce ourselves; harmless to repeat."""
        await self.sockets.send(Register(self.role, socket.gethostname(), os.getpid(), leases=self._leases(), job=self._job,
                                         serves=self._serves))

    async def send(self, message: Message) -> None:
        """Send to the coordinator."""
        await self.sockets.send(message)

    async def beat(self) -> None:
        """Send a heartbeat now, so that what changed is known at once."""
        if not self._suspended:
            self.num_beats += 1
            await self.sockets.send(msgspec.structs.replace(self._heartbeat(), leases_seen=self._leases_sent))

    @property
    def in_touch(self) -> bool:
        """Whether the coordinator has taken us in, stays, and has been heard lately."""
        return self._welcomed.is_set() and not self._suspended and time.monotonic() - self._heard < max(10.0, 3 * self._interval_s)

    async def welcomed(self) -> None:
        """Wait until the coordinator has taken us in. Raises `CoordinatorLost` after `START_TIMEOUT_S`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await self._welcomed.wait()
        except TimeoutError as error:
            raise CoordinatorLost(f"the coordinator has not answered in {START_TIMEOUT_S:g} s. Look at the training job's log") from error

    def finish(self, cause: str) -> None:
        """Let `serve` return `cause`."""
        self.finish_cause = cause
        self._finished.set()

    async def serve(self) -> str:
        """Keep the standing until the run is over; returns its cause ('' is complete). Raises `CoordinatorLost`."""
        finished = asyncio.create_task(self._finished.wait())
        try:
            while not finished.done():
                newer = await self._converse(finished)
                if newer is not None and not finished.done():
                    await self._connect(newer)
        finally:
            finished.cancel()
        assert self.finish_cause is not None
        return self.finish_cause

    # -- one coordinator -----------------------------------------------------------------------------------------------

    async def _converse(self, finished: asyncio.Task) -> Address | None:
        """Talk with this coordinator until `finished`, or until there is a newer one, whose address is returned."""
        watching = asyncio.create_task(self._watch())
        parts = [watching, *(asyncio.create_task(loop()) for loop in (self._receive, self._subscribe, self._beat))]
        try:
            await asyncio.wait([finished, *parts], return_when=asyncio.FIRST_COMPLETED)
            for part in parts:
                if part.done():
                    part.result()  # raises what ended it
            return watching.result() if watching.done() else None
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _receive(self) -> None:
        while True:
            message = await self.sockets.receive()
            self._heard = time.monotonic()
            match message:
                case Welcome():
                    self._welcomed.set()
                    self._announced(message.announcement)
                    self._on_message(message)
                    await self.beat()
                case HeartbeatReply():
                    self._leases_sent, self.num_replies = message.leases_sent, self.num_replies + 1
                    self._interval_s = max(self.config.heartbeat_s, message.interval_s)
                    self._announced(message.announcement)
                    if not message.known or not self._welcomed.is_set():  # a broken connection may have cost us the welcome
                        await self.register()
                case Finish():
                    self.finish(message.cause)
                case Suspended():
                    self._suspended = self._follows
                    self._on_message(message)
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
            await asyncio.sleep(self._interval_s)

    async def _watch(self) -> Address:
        """Look out for the end of the run and for a newer coordinator; returns its address. Raises `NoCoordinator`."""
        looked = time.monotonic()
        while True:
            before = time.monotonic()
            await asyncio.sleep(self.config.heartbeat_s)
            now = time.monotonic()
            self._heard = min(now, self._heard + own_pause(now - before, self.config.heartbeat_s))
            silent = now - self._heard
            if self._suspended or silent > 3 * self._interval_s or (self._follows and now - looked > LOOK_S):
                looked = now
                cause, newer = await asyncio.to_thread(self._look, self._follows and not self.in_touch)
                if cause is not None:
                    self.finish(cause)
                    continue
                if newer is not None:
                    return newer
            if silent > self._silence_s and not await self._was_stalled():
                raise NoCoordinator(f"the coordinator has been silent for {silent:.0f} s")

    async def _was_stalled(self) -> bool:
        """Whether it is the run folder's file system that does not answer, for as long as a process waits for that at most: the coordinator writes
        there, too, and will be heard when it does."""
        began = time.monotonic()
        with contextlib.suppress(TimeoutError, OSError):
            await asyncio.wait_for(asyncio.to_thread(os.utime, self.run.processes), max(self._silence_s, self.run.patience_s))
            now = time.monotonic()
            if now - began > self.config.heartbeat_s:
                self._heard = now
                return True
        return False

    def _look(self, alone: bool) -> tuple[str | None, Address | None]:
        """What the run folder says: why the run is over, if it is, and a newer coordinator, if there is one to follow.

        `alone`: nobody else would see that the run was asked to stop.
        """
        try:
            if (outcome := self.run.ended()) is not None:
                return outcome["cause"], None
            address = newest(self.run) if self._follows else None
            if address is not None and self._address is not None and address.epoch > self._address.epoch:
                return None, address
            if alone and (stop := self.run.stop_requested()) is not None:
                return f"stopped: {stop['reason']}", None
        except OSError as error:
            print(f"warning: {self.run.path} cannot be read: {error}. Looking again in {self.config.heartbeat_s:g} s", flush=True)
        return None, None

    def _announced(self, announcement: Announcement | None) -> None:
        known = self._newest
        if announcement is not None and (known is None or announcement.version > known.version or announcement.offers_more_than(known)):
            self._newest = announcement
            self._on_announcement(announcement)

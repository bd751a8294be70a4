"""A worker's sockets: DEALER for everything with an answer, SUB for versions. Reconnects by itself.

Messages keep their order. After a reconnection the routing id is the same, so the coordinator knows the worker again;
if it does not (HeartbeatReply.known is false), the worker registers anew.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time

import zmq
import zmq.asyncio

from workers.config import TransportConfig
from workers.messages.codec import LARGE_FRAME, encode, from_coordinator
from workers.messages.parts import Message
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.transport.keys import KeyPair
from workers.transport.rendezvous import Address, newest
from workers.transport.server import MIB

QUICK_S = 5.0
LINGER_MS = 2000


class CoordinatorLost(ConnectionError):
    """The coordinator cannot be found, refuses us, or has been silent for too long."""


class NoCoordinator(CoordinatorLost):
    """No coordinator has been there for as long as this worker waits for one."""


class RunOver(CoordinatorLost):
    """The run had ended, with `cause`, before a coordinator was found."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the run has ended: {cause}")
        self.cause = cause


async def find_coordinator(run: RunFolder, timeout_s: float, min_epoch: int = 0) -> Address:
    """Wait for the address of a coordinator of `min_epoch` or later. Raises `RunOver`, `NoCoordinator` after `timeout_s` seconds, or
    `OutageTooLong`.

    Looks often at first, then once a second: the run folder lies on storage that many share.
    """
    started, over = time.monotonic(), threading.Event()
    try:
        while (address := await asyncio.to_thread(patiently, run, lambda: _coordinator(run, min_epoch), hurry=over.is_set)) is None:
            waited = time.monotonic() - started
            if waited > timeout_s:
                raise NoCoordinator(f"{run.rendezvous}: no coordinator has appeared in {timeout_s:g} s. Look at the training job's log")
            await asyncio.sleep(0.1 if waited < QUICK_S else 1.0)
        return address
    finally:
        over.set()


def _coordinator(run: RunFolder, min_epoch: int) -> Address | None:
    """Where it is, if there is one. Raises `RunOver`."""
    if (address := newest(run)) is not None and address.epoch >= min_epoch:
        return address
    if (outcome := run.ended()) is not None:
        raise RunOver(outcome["cause"])
    if (stop := run.stop_requested()) is not None:
        raise RunOver(f"stopped: {stop['reason']}")
    if run.launcher_is_gone():
        raise RunOver("the launcher died before the training job had started")
    return None


class ClientSockets:
    """DEALER and SUB of one worker, connected to one coordinator. `routing_id`: by which it knows the worker; without, a new one."""

    def __init__(self, config: TransportConfig, address: Address, server_public: bytes, client: KeyPair, routing_id: bytes = b"") -> None:
        self._context = zmq.asyncio.Context()
        self._decoder = from_coordinator(config.max_message_mb * MIB)
        self._dealer = self._socket(zmq.DEALER, config, server_public, client)
        self._dealer.routing_id = routing_id or new_routing_id()
        self._subscriber = self._socket(zmq.SUB, config, server_public, client)
        self._subscriber.subscribe(b"")
        self._dealer.connect(address.router)
        self._subscriber.connect(address.publisher)

    def _socket(self, kind: int, config: TransportConfig, server_public: bytes, client: KeyPair) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = LINGER_MS
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = LARGE_FRAME
        socket.reconnect_ivl, socket.reconnect_ivl_max = 100, 2000
        socket.curve_serverkey = server_public
        socket.curve_publickey, socket.curve_secretkey = client.public, client.secret
        return socket

    async def send(self, message: Message) -> None:
        """Send to the coordinator; queued while the connection is away."""
        await self._dealer.send_multipart(encode(message), copy=False)

    async def receive(self) -> Message:
        """The next message for this worker. Raises `MessageError` on a malformed one."""
        return self._decoder.decode(await self._dealer.recv_multipart())

    async def receive_published(self) -> Message:
        """The next published message. Raises `MessageError` on a malformed one."""
        return self._decoder.decode(await self._subscriber.recv_multipart())

    def close(self, linger_ms: int = LINGER_MS) -> None:
        """Close; what was sent last still gets `linger_ms` to leave."""
        self._subscriber.close(linger=0)
        self._dealer.close(linger=linger_ms)
        self._context.term()


def new_routing_id() -> bytes:
    """A name for one worker's connections; nobody else has it."""
    return b"w" + os.urandom(8)

"""A worker's sockets: DEALER for everything with an answer, SUB for versions. Reconnects by itself.

Messages keep their order. After a reconnection the routing id is the same, so the coordinator knows the worker again;
if it does not (HeartbeatReply.known is false), the worker registers anew.
"""

from __future__ import annotations

import asyncio
import os
import time

import zmq
import zmq.asyncio

from workers.config import TransportConfig
from workers.messages.codec import encode, from_coordinator
from workers.messages.types import Message
from workers.rundir import RunFolder
from workers.transport.keys import KeyPair
from workers.transport.rendezvous import Address, newest
from workers.transport.server import MIB


class CoordinatorLost(ConnectionError):
    """The coordinator cannot be found or has been silent for too long."""


async def find_coordinator(run: RunFolder, timeout_s: float) -> Address:
    """Wait for a coordinator's address. Raises `CoordinatorLost` after `timeout_s` seconds, or if the run has ended."""
    deadline = time.monotonic() + timeout_s
    while (address := newest(run)) is None:
        if (outcome := run.ended()) is not None:
            raise CoordinatorLost(f"the run has ended: {outcome['cause']}")
        if run.stop.exists() or run.launcher_is_gone():
            raise CoordinatorLost("the run was stopped before its training job had started")
        if time.monotonic() > deadline:
            raise CoordinatorLost(f"{run.rendezvous}: no coordinator has appeared in {timeout_s:g} s. Look at the training job's log")
        await asyncio.sleep(0.1)
    return address


class ClientSockets:
    """DEALER and SUB of one worker, connected to one coordinator."""

    def __init__(self, config: TransportConfig, address: Address, server_public: bytes, client: KeyPair) -> None:
        self._context = zmq.asyncio.Context()
        self._decoder = from_coordinator(config.max_message_mb * MIB)
        self._dealer = self._socket(zmq.DEALER, config, server_public, client)
        self._dealer.routing_id = b"w" + os.urandom(8)
        self._subscriber = self._socket(zmq.SUB, config, server_public, client)
        self._subscriber.subscribe(b"")
        self._dealer.connect(address.router)
        self._subscriber.connect(address.publisher)

    def _socket(self, kind: int, config: TransportConfig, server_public: bytes, client: KeyPair) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 2000
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = config.max_message_mb * MIB
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

    def close(self) -> None:
        """Close; what was sent last still gets up to two seconds to leave."""
        self._subscriber.close(linger=0)
        self._dealer.close()
        self._context.term()

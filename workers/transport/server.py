"""The coordinator's sockets.

    workers --DEALER--> ROUTER   registration, heartbeats, groups, batches     (CURVE, the run's keys: door.py)
    workers <---SUB---- PUB      new versions                                  (the same)

Nothing is dropped: a worker that says more than is read is read later. A peer without the run's key gets nothing and is counted. A peer
that is gone is noticed at the next send (ROUTER_MANDATORY). One that connects again under its routing id takes over from its old
connection, even before that one is known to be broken (ROUTER_HANDOVER).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import zmq
import zmq.asyncio

from workers.config import ConfigError, TransportConfig
from workers.messages.codec import LARGE_PIECE, MessageError, encode, from_workers
from workers.messages.parts import Message
from workers.transport.door import Door
from workers.transport.keys import KeyPair

MIB = 1 << 20
IO_THREADS = 4
"""They decrypt and encrypt: one does about 0.5 GB a second."""


class ServerSockets:
    """ROUTER and PUB of the coordinator, bound to one interface."""

    def __init__(self, config: TransportConfig, server: KeyPair, client_public: bytes) -> None:
        self._context = zmq.asyncio.Context(IO_THREADS)
        self.door = Door(self._context, server, client_public)
        self._decoder = from_workers(config.max_message_mb * MIB)
        self.num_malformed = 0
        self._router, self._publisher = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PUB)
        self._plain_router: zmq.Socket = zmq.Socket.shadow(self._router.underlying)
        self._router.router_mandatory = self._router.router_handover = True
        self._router.sndhwm = self._publisher.sndhwm = 0
        try:
            self.router_endpoint = self.door.bind(self._router, config)
            self.publisher_endpoint = self.door.bind(self._publisher, config)
        except ConfigError:
            self.close()
            raise

    async def receive(self) -> tuple[bytes, Message | MessageError]:
        """The next message and the peer it came from; a malformed one comes as the error that names what is wrong."""
        return self._read(await self._router.recv_multipart())

    def waiting(self, count: int = 100) -> Iterator[tuple[bytes, Message | MessageError]]:
        """What has arrived besides, up to so many messages."""
        with contextlib.suppress(zmq.Again):
            for _ in range(count):
                yield self._read(self._plain_router.recv_multipart(zmq.DONTWAIT))

    def _read(self, frames: list[bytes]) -> tuple[bytes, Message | MessageError]:
        peer, *pieces = frames
        try:
            return peer, self._decoder.decode(pieces)
        except MessageError as error:
            self.num_malformed += 1
            return peer, error

    async def send(self, peer: bytes, message: Message) -> bool:
        """Send to one peer; false if it is not connected (any more)."""
        try:
            await self._router.send_multipart([peer, *encode(message, LARGE_PIECE)], copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        return True

    async def publish(self, message: Message) -> None:
        """Send to every subscriber; a lost one is made good by the next heartbeat's reply."""
        await self._publisher.send_multipart(encode(message))

    def close(self, linger_ms: int = 0) -> None:
        """Close the sockets and give the ports back. What is not sent yet has `linger_ms` milliseconds to leave."""
        self.door.close()
        for socket in (self._router, self._publisher):
            socket.close(linger=linger_ms)
        self._context.term()

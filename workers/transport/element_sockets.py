"""Sockets between rollout workers and what works for them on other nodes: reward elements, and the other nodes of their replica.

    rollout worker: one ElementLink (DEALER) for each element --CURVE, the run's keys (door.py)--> ElementSocket (ROUTER) of the element

Nothing is dropped: what is in flight is bounded by what the worker generates at once. A link does not reconnect: what
was asked of an element that is gone is asked elsewhere, and a new link is made for one that is back.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from workers.config import TransportConfig
from workers.messages.codec import MAX_FRAME, Decoder, MessageError, encode
from workers.messages.parts import Message
from workers.run.folder import RunFolder
from workers.transport.addresses import address_of
from workers.transport.door import Door
from workers.transport.keys import read_keys
from workers.transport.monitor import ALIVE_MS, DEAD_MS, GONE
from workers.transport.server import MIB

LATER_MS = 3_600_000


class LinkLost(ConnectionError):
    """Nothing more will come from this element."""


class Unreachable(LinkLost):
    """Nothing was sent to this element: it cannot be connected to, or does not know our key."""


class ElementSocket:
    """The end of who is asked, bound from its construction to `close`. `takes`: the union of messages that come. Raises `ConfigError` where it
    cannot be bound."""

    def __init__(self, run: RunFolder, config: TransportConfig, takes: object) -> None:
        server, client = read_keys(run, "server"), read_keys(run, "client")
        self._context = zmq.asyncio.Context()
        self.door = Door(self._context, server, client.public)
        self._decoder = Decoder(takes, config.max_message_mb * MIB)
        self.num_malformed = 0
        self._router = self._context.socket(zmq.ROUTER)
        _limit(self._router)
        self._router.router_mandatory = True
        try:
            self.endpoint = self.door.bind(self._router, dataclasses.replace(config, interface=address_of(config.interface)))
        except BaseException:
            self.close()
            raise

    async def receive(self) -> tuple[bytes, Any]:
        """The next request and the peer it came from. Raises `MessageError` on a malformed one."""
        peer, *pieces = await self._router.recv_multipart()
        try:
            return peer, self._decoder.decode(pieces)
        except MessageError:
            self.num_malformed += 1
            raise

    async def send(self, peer: bytes, message: Message) -> None:
        """Send to one peer; nothing where it is gone."""
        try:
            await self._router.send_multipart([peer, *encode(message)], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def close(self, linger_ms: int = 0) -> None:
        """Close, and give the port back. What is not sent yet has `linger_ms` milliseconds to leave."""
        self.door.close()
        self._router.close(linger=linger_ms)
        self._context.term()


class ElementLink:
    """A rollout worker's end: one connection to one element. `takes`: the union of messages that come."""

    def __init__(self, context: zmq.asyncio.Context, run: RunFolder, config: TransportConfig, takes: object, endpoint: str) -> None:
        server, client = read_keys(run, "server"), read_keys(run, "client")
        self._decoder = Decoder(takes, config.max_message_mb * MIB)
        self._dealer = socket = context.socket(zmq.DEALER)
        _limit(socket)
        # Not -1, for never: a broken connection would then take answers with it that are here, but not yet read.
        socket.reconnect_ivl, socket.connect_timeout = LATER_MS, DEAD_MS
        socket.curve_serverkey = server.public
        socket.curve_publickey, socket.curve_secretkey = client.public, client.secret
        self._monitor: zmq.asyncio.Socket = socket.get_monitor_socket(sum(GONE))
        self._gone = asyncio.ensure_future(self._monitor.recv_multipart())
        socket.connect(endpoint)

    async def send(self, message: Message) -> None:
        """Send, or queue until the connection stands. Raises `Unreachable` where there is none any more."""
        try:
            await self._dealer.send_multipart(encode(message), zmq.DONTWAIT, copy=False)
        except zmq.Again:
            raise Unreachable("the connection is gone") from None

    async def receive(self) -> Any:
        """The next answer. Raises `LinkLost` once the connection is gone (`Unreachable`: it never stood), `MessageError` on a malformed one."""
        answer = asyncio.ensure_future(self._dealer.recv_multipart())
        try:
            await asyncio.wait([answer, self._gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            answer.cancel()  # no harm to one that is there
        try:  # what came last may be noticed after the end
            pieces = answer.result() if not answer.cancelled() and answer.done() else await self._dealer.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            event = parse_monitor_message(self._gone.result())["event"]
            raise (LinkLost if event == zmq.EVENT_DISCONNECTED else Unreachable)(GONE[event]) from None
        return self._decoder.decode(pieces)

    def close(self, linger_ms: int = 0) -> None:
        """Close. What is not sent yet has `linger_ms` milliseconds to leave."""
        self._gone.cancel()
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=linger_ms)


class ElementLinks:
    """Makes the links of one rollout worker."""

    def __init__(self, run: RunFolder, config: TransportConfig, takes: object) -> None:
        self._run, self._config, self._takes, self._context = run, config, takes, zmq.asyncio.Context()

    def open(self, endpoint: str) -> ElementLink:
        """A link to the element at `endpoint`, not yet connected."""
        return ElementLink(self._context, self._run, self._config, self._takes, endpoint)

    def close(self) -> None:
        """Close all links, and the context, when what they have to say has left."""
        self._context.destroy(linger=0)


def _limit(socket: zmq.asyncio.Socket) -> None:
    socket.linger = socket.sndhwm = socket.rcvhwm = 0
    socket.maxmsgsize = MAX_FRAME
    socket.heartbeat_ivl, socket.heartbeat_timeout = ALIVE_MS, DEAD_MS

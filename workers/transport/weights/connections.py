"""A fetcher's connections to weight servers; says at once when one is gone.

    DEALER, encrypted   TicketWanted -> Ticket      the server has shown that it is one of this run's, and only then is there
    DEALER, plain       ChunkWanted -> Content      a connection in the clear, opened with the ticket: nobody else could have taken its place
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from workers.config.training import WeightsConfig
from workers.messages.codec import MALFORMED, MAX_FRAME
from workers.messages.parts import Version
from workers.transport.monitor import ALIVE_MS, DEAD_MS, GONE
from workers.transport.server import MIB
from workers.transport.weights.messages import (
    ChunkWanted,
    Content,
    FromFetcher,
    FromServer,
    ManifestWanted,
    Ticket,
    TicketWanted,
    Unavailable,
    WeightKeys,
    encode,
    from_server,
)

AT_ONCE = 16
MAX_MANIFEST_BYTES = 64 * MIB


@dataclass(frozen=True)
class Reply:
    """What a server said; `content` belongs to a `Content`."""

    endpoint: str
    message: Content | Unavailable
    content: memoryview


@dataclass(frozen=True)
class Gone:
    """A server that nothing more will come of."""

    endpoint: str
    cause: str


class _Link:
    """The connections to one server: `control`, and once there are tickets those that bring chunks, weights.streams of them at most, each opened
    when something is asked of it (one that is closed in its handshake counts as a stranger's): where all is encrypted, `control` and more like it."""

    def __init__(self, context: zmq.Context, endpoint: str, weights: WeightsConfig, keys: WeightKeys) -> None:
        self._context, self._endpoint, self._weights, self._keys = context, endpoint, weights, keys
        self._wanted: list[ChunkWanted] = []  # until there are as many tickets as streams
        self.monitors: dict[zmq.Socket, zmq.Socket] = {}
        self._tickets: list[Ticket] = []
        self._bulk: dict[int, zmq.Socket] = {}
        self.control = self._encrypted()
        self.ask(TicketWanted(weights.streams))

    def _encrypted(self) -> zmq.Socket:
        dealer = self._dealer()
        dealer.curve_serverkey = self._keys.server.public
        dealer.curve_publickey, dealer.curve_secretkey = self._keys.client.public, self._keys.client.secret
        return self._connect(dealer, self._endpoint)

    def _by_ticket(self, ticket: Ticket) -> zmq.Socket:
        dealer = self._dealer()
        dealer.plain_username, dealer.plain_password = ticket.name.encode(), ticket.secret.encode()
        return self._connect(dealer, f"{self._endpoint.rpartition(':')[0]}:{ticket.port}")

    def _dealer(self) -> zmq.Socket:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger, dealer.reconnect_ivl, dealer.sndhwm = 0, -1, 0
        dealer.maxmsgsize = self._weights.chunk_mb * MIB + MAX_FRAME
        dealer.heartbeat_ivl, dealer.heartbeat_timeout, dealer.connect_timeout = ALIVE_MS, DEAD_MS, DEAD_MS
        return dealer

    def _connect(self, dealer: zmq.Socket, endpoint: str) -> zmq.Socket:
        self.monitors[dealer] = dealer.get_monitor_socket(sum(GONE))
        dealer.connect(endpoint)
        return dealer

    def admitted(self, ticket: Ticket) -> None:
        """The server has given a ticket. One too many is ignored."""
        if self._opened:
            return
        self._tickets.append(ticket)
        if self._opened:
            for wanted in self._wanted:
                self.ask(wanted)

    @property
    def _opened(self) -> bool:
        return len(self._tickets) == self._weights.streams

    def _carrier(self, number: int) -> zmq.Socket:
        if (stream := number % len(self._tickets)) not in self._bulk:
            ticket = self._tickets[stream]
            self._bulk[stream] = self._by_ticket(ticket) if ticket.port else self._encrypted() if self._bulk else self.control
        return self._bulk[stream]

    def ask(self, message: FromFetcher) -> None:
        """Ask for something, as soon as that can be."""
        if not isinstance(message, ChunkWanted):
            _send(self.control, message)
        elif self._opened:
            _send(self._carrier(message.number), message)
        else:
            self._wanted.append(message)

    def close(self) -> None:
        for dealer in self.monitors:
            dealer.disable_monitor()
            dealer.close()


def _send(dealer: zmq.Socket, message: FromFetcher) -> None:
    with contextlib.suppress(zmq.Again):  # the connection is gone: the monitor says so
        dealer.send(encode(message), zmq.DONTWAIT)


class WeightLinks:
    """Connections to as many servers as are asked, for one version. For one thread, but for `wake`."""

    def __init__(self, weights: WeightsConfig, keys: WeightKeys, version: Version) -> None:
        self._weights, self._keys, self._version = weights, keys, version
        self._context = zmq.Context(io_threads=weights.streams)
        self._links: dict[str, _Link] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ask_manifest(self, endpoint: str) -> None:
        """Ask for the manifest."""
        self._link(endpoint).ask(ManifestWanted(self._version))

    def ask_chunk(self, endpoint: str, number: int, name: str, offset: int, size: int, base: Version | None) -> None:
        """Ask for a chunk."""
        self._link(endpoint).ask(ChunkWanted(self._version, number, name, offset, size, base))

    def _link(self, endpoint: str) -> _Link:
        if endpoint not in self._links:
            self._links[endpoint] = _Link(self._context, endpoint, self._weights, self._keys)
        return self._links[endpoint]

    def poll(self, timeout_ms: int) -> list[Reply | Gone]:
        """What has come, after at most `timeout_ms`; perhaps nothing, after a `wake`."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for link in self._links.values():
            for socket in (*link.monitors, *link.monitors.values()):
                poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found: list[Reply | Gone] = []
        for endpoint, link in list(self._links.items()):
            for dealer, monitor in list(link.monitors.items()):
                if dealer in ready:
                    found += self._read(endpoint, link, dealer)
                if monitor in ready:
                    event = parse_monitor_message(monitor.recv_multipart())["event"]
                    found.append(Gone(endpoint, GONE[event]))
        return found

    def _read(self, endpoint: str, link: _Link, dealer: zmq.Socket) -> list[Reply | Gone]:
        found: list[Reply | Gone] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < AT_ONCE:
                header, *pieces = dealer.recv_multipart(zmq.DONTWAIT, copy=False)
                try:
                    message: FromServer = from_server.decode(header.buffer)
                    if isinstance(message, Ticket):
                        link.admitted(message)
                    else:
                        found.append(Reply(endpoint, message, _joined([piece.buffer for piece in pieces])))
                except MALFORMED as error:
                    found.append(Gone(endpoint, f"sent a malformed message ({error})"))
        return found

    def drop(self, endpoint: str) -> None:
        """Be done with one server. Harmless to repeat."""
        link = self._links.pop(endpoint, None)
        if link is not None:
            link.close()

    def wake(self) -> None:
        """End a `poll` that is going on, from any thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Close all; no thread may `wake` any more."""
        for endpoint in list(self._links):
            self.drop(endpoint)
        self._context.destroy(linger=0)
        os.close(self._wake)


def _joined(pieces: list[memoryview]) -> memoryview:
    if len(pieces) == 1:
        return pieces[0]
    if (size := sum(map(len, pieces))) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {size} bytes: must be at most {MAX_MANIFEST_BYTES}")
    return memoryview(b"".join(pieces))

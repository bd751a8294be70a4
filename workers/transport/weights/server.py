"""Serves weights to other nodes: a thread with two ROUTER sockets, reading from the files of the node's store.

    expect, offer, offer_incoming, withdraw (any thread) --> [ offers ] <-- requests of fetchers (connections.py)
                                                                 |             tickets, manifests: encrypted
                          mapped files, differences -------------+-->          chunks: in the clear, by ticket; or encrypted as well
                                                                               what is still on its way is sent when it has arrived

The thread only says what is to be sent: encryption, and copying into the network's buffers, are the work of weights.streams I/O threads. The
sockets never wait for anybody: a fetcher that reads slowly has no more than its own window underway. Who does not have the run's keys
gets nothing, not even to say anything, and is counted (door.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import zmq

from workers.config import TransportConfig
from workers.config.choices import Security
from workers.config.training import WeightsConfig
from workers.messages.codec import MALFORMED, cut
from workers.messages.parts import Version
from workers.transport.addresses import address_of
from workers.transport.door import Door
from workers.transport.lasting_thread import LastingThread
from workers.transport.monitor import ALIVE_MS, DEAD_MS
from workers.transport.weights.messages import (
    ALL,
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
    from_fetcher,
)
from workers.transport.weights.offers import CompleteOffer, IncomingOffer, Missing, Offer
from workers.weights.partial_version import Incoming

MAX_QUEUED = 4096  # messages underway to one fetcher; its window is far smaller
AT_ONCE = 64
END_S = 30.0


@dataclasses.dataclass
class ServerCounters:
    """What a server has done since it started. `num_connections`: those that have shown a key or a ticket; `num_refused`: those without;
    `num_failures`: how often a thread of its has failed."""

    bytes_sent: int = 0
    chunks_sent: int = 0
    deltas_sent: int = 0
    num_fetchers: int = 0
    num_connections: int = 0
    num_refused: int = 0
    num_malformed: int = 0
    num_failures: int = 0


Peer = tuple[zmq.Socket, bytes]
Waiting = tuple[Peer, ManifestWanted | ChunkWanted]
Place = tuple[str, int] | None
"""Of a chunk: its file, and where in it; None for the manifest."""


class WeightServer:
    """Serves from its start until `close`. `config.interface` may be a name, an address or 'auto' (workers/transport/addresses.py).

    Raises `ConfigError` where it cannot be bound."""

    def __init__(self, config: TransportConfig, weights: WeightsConfig, keys: WeightKeys) -> None:
        self._counters = ServerCounters()
        self._offers: dict[Version, Offer | None] = {}  # None: expected
        self._waiting: dict[Version, dict[Place, list[Waiting]]] = {}
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake).atexit = False  # a writer may still report a chunk after `close`
        self._context = zmq.Context(io_threads=weights.streams)
        self._door = Door(self._context, keys.server, keys.client.public)
        self._sockets: list[zmq.Socket] = []
        try:
            config = dataclasses.replace(config, interface=address_of(config.interface))
            self.endpoint = self._door.bind(self._socket(), config)
            self._bulk_port = 0
            if weights.security is Security.digest:
                self._bulk_port = int(self._door.bind(self._socket(), config, by_ticket=True).rpartition(":")[2])
        except BaseException:
            self._tear_down()
            raise
        self._open = True
        self._thread = LastingThread("weight server", self._run)

    def _socket(self) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER)
        self._sockets.append(socket)
        socket.router_mandatory, socket.sndhwm = True, MAX_QUEUED
        socket.heartbeat_ivl, socket.heartbeat_timeout = ALIVE_MS, DEAD_MS
        return socket

    # -- for any thread --------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> ServerCounters:
        """The counters as they stand."""
        return dataclasses.replace(self._counters, num_connections=self._door.arrivals.num_admitted, num_refused=self._door.num_refused,
                                   num_failures=self._thread.num_failures + self._door.num_failures)

    def expect(self, version: Version) -> None:
        """This node is about to get `version`: whoever asks waits for it instead of being turned away."""
        self._do(lambda: self._offers.setdefault(version, None))

    def offer(self, version: Version, folder: Path, manifest_content: bytes | None = None, delta: Path | None = None) -> None:
        """Serve the files of `folder`, complete; with their manifest, where this is the source of that. `delta`: their differences to the
        version before (workers/weights/delta.py). Raises `WeightsError` where they cannot be read."""
        self._put(CompleteOffer(version, folder, manifest_content, delta))

    def offer_incoming(self, incoming: Incoming) -> None:
        """Serve a version while it arrives, and afterwards."""
        offer, version = IncomingOffer(incoming), incoming.version  # what it keeps must not lead back to it: its files are closed with it
        incoming.subscribe(lambda chunk: self._do(lambda: self._retry(version, (chunk.name, chunk.offset))))  # before anybody can wait for a chunk
        self._put(offer)

    def withdraw(self, version: Version) -> None:
        """Serve it no longer; whoever waits for it is told so."""
        self._do(lambda: self._withdraw(version))

    def close(self) -> None:
        """End the thread and free the port. Harmless to repeat."""
        if self._open:
            self._do(self._end)
            self._thread.join(END_S)

    def _put(self, offer: Offer) -> None:
        def put() -> None:
            self._offers[offer.version] = offer
            self._retry(offer.version)

        self._do(put)

    def _do(self, command: Callable[[], object]) -> None:
        """Have the server's thread do something before it reads the next request."""
        self._commands.put(command)
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.eventfd_write(self._wake, 1)

    # -- the server's thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        for socket in self._sockets:
            poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while self._open:
            ready = dict(poller.poll())
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            self._obey()
            for socket in self._sockets:
                if socket in ready:
                    self._read(socket)
        self._offers.clear()
        self._tear_down()

    def _tear_down(self) -> None:
        self._door.close()
        self._context.destroy(linger=0)

    def _end(self) -> None:
        self._open = False

    def _obey(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _read(self, socket: zmq.Socket) -> None:
        for _ in range(AT_ONCE):
            try:
                name, *frames = socket.recv_multipart(zmq.DONTWAIT)
                request: FromFetcher = from_fetcher.decode(*frames)  # TypeError: not one frame
            except zmq.Again:
                return
            except MALFORMED:
                self._counters.num_malformed += 1
                continue
            self._obey()  # what was offered before it was asked for is there
            if isinstance(request, TicketWanted):
                self._counters.num_fetchers += 1
                for _ in range(request.count):
                    self._send((socket, name), Ticket(self._bulk_port, *self._door.tickets.issue()) if self._bulk_port else Ticket(0))
            else:
                self._answer((socket, name), request)

    def _answer(self, peer: Peer, request: ManifestWanted | ChunkWanted) -> None:
        version, number = request.version, request.number if isinstance(request, ChunkWanted) else ALL
        if version not in self._offers:
            self._send(peer, Unavailable(ALL, f"version {version} is not here"))
            return
        offer = self._offers[version]
        try:
            if offer is None or (found := offer.find(request) if isinstance(request, ChunkWanted) else (offer.manifest(), False)) is None:
                place = (request.name, request.offset) if isinstance(request, ChunkWanted) else None
                self._waiting.setdefault(version, {}).setdefault(place, []).append((peer, request))
                return
        except Missing as error:
            self._send(peer, Unavailable(number, str(error)))
            return
        content, delta = found
        self._count(1, number, len(content), delta)  # first: who has it all may ask for the sum before this thread goes on
        if not self._send(peer, Content(number, delta), *(cut(content) if number == ALL else [content])):
            self._count(-1, number, len(content), delta)

    def _count(self, messages: int, number: int, size: int, delta: bool) -> None:
        self._counters.bytes_sent += messages * size
        self._counters.chunks_sent += messages * (number != ALL)
        self._counters.deltas_sent += messages * delta

    def _send(self, peer: Peer, message: FromServer, *content: bytes | memoryview) -> bool:
        socket, name = peer
        try:
            socket.send_multipart([name, encode(message), *content], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False  # gone, or it asks for far more than it reads
        return True

    def _retry(self, version: Version, *places: Place) -> None:
        """What `version` has at `places` has come, or, without any, what there is of it has changed."""
        waiting = self._waiting.get(version, {})
        for place in places or list(waiting):
            for peer, request in waiting.pop(place, []):
                self._answer(peer, request)
        if not waiting:
            self._waiting.pop(version, None)

    def _withdraw(self, version: Version) -> None:
        self._offers.pop(version, None)
        self._retry(version)

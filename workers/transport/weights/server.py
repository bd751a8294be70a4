"""Serves weights to other nodes: a thread with a ROUTER socket, reading from the files of the node's store.

    expect, offer, offer_incoming, withdraw (any thread) --> [ offers ] <-- requests of fetchers (fetcher.py)
                                                                 |
                          mapped files, differences -------------+--> content; what is still on its way is sent when it has arrived

The socket never waits for anybody: a fetcher that reads slowly has no more than its own window underway. Who cannot prove to know
the run's keys (a token good for once; with weights.security=curve, the keys themselves) gets nothing and is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from workers.config import TransportConfig
from workers.config.choices import Security
from workers.config.training import WeightsConfig
from workers.messages.parts import Version
from workers.transport.addresses import address_of
from workers.transport.monitor import ALIVE_MS, DEAD_MS
from workers.transport.server import AllowList, bind
from workers.transport.weights.messages import (
    ALL,
    ChunkWanted,
    Content,
    FromFetcher,
    FromServer,
    Hello,
    ManifestWanted,
    Unavailable,
    WeightKeys,
    encode,
    from_fetcher,
)
from workers.transport.weights.offers import CompleteOffer, IncomingOffer, Missing, Offer
from workers.transport.weights.sessions import Sessions
from workers.weights.partial_version import Incoming

MAX_REQUEST_BYTES = 1 << 16
MAX_QUEUED = 4096  # messages underway to one fetcher; its window is far smaller
AT_ONCE = 64
END_S = 30.0


@dataclasses.dataclass
class ServerCounters:
    """What a server has done since it started. `num_refused`: connections and requests without a good token or key."""

    bytes_sent: int = 0
    chunks_sent: int = 0
    deltas_sent: int = 0
    num_fetchers: int = 0
    num_refused: int = 0
    num_malformed: int = 0


Waiting = tuple[bytes, ManifestWanted | ChunkWanted]


class WeightServer:
    """Serves from its start until `close`. `config.interface` may be a name, an address or 'auto' (workers/transport/addresses.py).

    Raises `ConfigError` where it cannot be bound."""

    def __init__(self, config: TransportConfig, weights: WeightsConfig, keys: WeightKeys) -> None:
        self._keys, self._counters, self._allow = keys, ServerCounters(), AllowList(keys.client.public)
        self._offers: dict[Version, Offer | None] = {}  # None: expected
        self._sessions = Sessions(keys)
        self._waiting: dict[Version, list[Waiting]] = {}
        self._commands: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake).atexit = False  # a writer may still report a chunk after `close`
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._set_up(weights.security)
            self.endpoint = bind(self._router, dataclasses.replace(config, interface=address_of(config.interface)))
        except BaseException:
            self._tear_down()
            raise
        self._open = True
        self._thread = threading.Thread(target=self._run, name="weight server", daemon=True)
        self._thread.start()

    def _set_up(self, security: Security) -> None:
        socket = self._router
        socket.linger, socket.router_mandatory = 0, True
        socket.sndhwm, socket.rcvhwm, socket.maxmsgsize = MAX_QUEUED, MAX_QUEUED, MAX_REQUEST_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = ALIVE_MS, DEAD_MS
        if security is Security.curve:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback("headway", self._allow)
            socket.zap_domain, socket.curve_server = b"headway", True
            socket.curve_publickey, socket.curve_secretkey = self._keys.server.public, self._keys.server.secret

    # -- for any thread --------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> ServerCounters:
        """The counters as they stand."""
        return dataclasses.replace(self._counters, num_refused=self._counters.num_refused + self._allow.num_refused)

    def expect(self, version: Version) -> None:
        """This node is about to get `version`: whoever asks waits for it instead of being turned away."""
        self._do(lambda: self._offers.setdefault(version, None))

    def offer(self, version: Version, folder: Path, manifest_content: bytes | None = None, delta: Path | None = None) -> None:
        """Serve the files of `folder`, complete; with their manifest, where this is the source of that. `delta`: their differences to the
        version before (workers/weights/delta.py). Raises `WeightsError` where they cannot be read."""
        self._put(CompleteOffer(version, folder, manifest_content, delta))

    def offer_incoming(self, incoming: Incoming) -> None:
        """Serve a version while it arrives, and afterwards."""
        offer = IncomingOffer(incoming)
        incoming.subscribe(lambda _: self._do(lambda: self._retry(incoming.version)))  # before anybody can wait for a chunk
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
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while self._open:
                ready = dict(poller.poll())
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._obey()
                if self._router in ready:
                    self._read()
        finally:
            self._offers.clear()
            self._tear_down()

    def _tear_down(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    def _end(self) -> None:
        self._open = False

    def _obey(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _read(self) -> None:
        for _ in range(AT_ONCE):
            try:
                peer, *frames = self._router.recv_multipart(zmq.DONTWAIT)
                request: FromFetcher = from_fetcher.decode(*frames)
            except zmq.Again:
                return
            except (msgspec.MsgspecError, ValueError, TypeError):  # ValueError: text that is no UTF-8; TypeError: not one frame
                self._counters.num_malformed += 1
                continue
            self._obey()  # what was offered before it was asked for is there
            if isinstance(request, Hello) and self._sessions.begin(peer, request, self.endpoint):
                self._counters.num_fetchers += 1
            elif not isinstance(request, Hello) and (version := self._sessions.version(peer, request.nonce)) is not None:
                self._answer(peer, version, request)
            else:
                self._counters.num_refused += 1
                self._sessions.end(peer)
                self._send(peer, Unavailable(ALL, "no valid token of this run"))

    def _answer(self, peer: bytes, version: Version, request: ManifestWanted | ChunkWanted) -> None:
        number = request.number if isinstance(request, ChunkWanted) else ALL
        if version not in self._offers:
            self._send(peer, Unavailable(ALL, f"version {version} is not here"))
            return
        offer = self._offers[version]
        try:
            if offer is None or (found := offer.find(request) if isinstance(request, ChunkWanted) else (offer.manifest(), False)) is None:
                self._waiting.setdefault(version, []).append((peer, request))
                return
        except Missing as error:
            self._send(peer, Unavailable(number, str(error)))
            return
        content, delta = found
        self._count(1, number, len(content), delta)  # first: who has it all may ask for the sum before this thread goes on
        if not self._send(peer, Content(number, delta), content):
            self._count(-1, number, len(content), delta)

    def _count(self, messages: int, number: int, size: int, delta: bool) -> None:
        self._counters.bytes_sent += messages * size
        self._counters.chunks_sent += messages * (number != ALL)
        self._counters.deltas_sent += messages * delta

    def _send(self, peer: bytes, message: FromServer, *content: bytes | memoryview) -> bool:
        try:
            self._router.send_multipart([peer, encode(message), *content], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._sessions.end(peer)  # gone, or it asks for far more than it reads
            return False
        return True

    def _retry(self, version: Version) -> None:
        """Something of `version` has come."""
        for peer, request in self._waiting.pop(version, []):
            self._answer(peer, version, request)

    def _withdraw(self, version: Version) -> None:
        self._offers.pop(version, None)
        self._retry(version)
        self._sessions.end_all(version)

"""A fetcher's connections to weight servers, one DEALER each; says at once when one is gone."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from workers.config.choices import Security
from workers.config.training import WeightsConfig
from workers.messages.parts import Version
from workers.transport.monitor import ALIVE_MS, DEAD_MS, GONE
from workers.transport.server import MIB
from workers.transport.weights.messages import ChunkWanted, FromFetcher, FromServer, ManifestWanted, WeightKeys, encode, from_server

AT_ONCE = 16
MAX_MANIFEST_MIB = 64


@dataclass(frozen=True)
class Reply:
    """What a server said; `content` belongs to a `Content`."""

    endpoint: str
    message: FromServer
    content: memoryview


@dataclass(frozen=True)
class Gone:
    """A server that nothing more will come of."""

    endpoint: str
    cause: str


class _Link:
    """One connection."""

    def __init__(self, context: zmq.Context, endpoint: str, weights: WeightsConfig, keys: WeightKeys, version: Version) -> None:
        self.hello = keys.hello(endpoint, version)
        self.dealer: zmq.Socket = context.socket(zmq.DEALER)
        self.dealer.linger, self.dealer.reconnect_ivl, self.dealer.sndhwm = 0, -1, 0
        self.dealer.maxmsgsize = max(weights.chunk_mb, MAX_MANIFEST_MIB) * MIB
        self.dealer.heartbeat_ivl, self.dealer.heartbeat_timeout, self.dealer.connect_timeout = ALIVE_MS, DEAD_MS, DEAD_MS
        if weights.security is Security.curve:
            self.dealer.curve_serverkey = keys.server.public
            self.dealer.curve_publickey, self.dealer.curve_secretkey = keys.client.public, keys.client.secret
        self.monitor = self.dealer.get_monitor_socket(sum(GONE))
        self.dealer.connect(endpoint)
        self.send(self.hello)

    def send(self, message: FromFetcher) -> None:
        """Send; where the connection is gone, the monitor says so."""
        with contextlib.suppress(zmq.Again):
            self.dealer.send(encode(message), zmq.DONTWAIT)

    def close(self) -> None:
        self.dealer.disable_monitor()
        self.dealer.close()


class WeightLinks:
    """Connections to as many servers as are asked, for one version. For one thread, but for `wake`."""

    def __init__(self, weights: WeightsConfig, keys: WeightKeys, version: Version) -> None:
        self._weights, self._keys, self._version = weights, keys, version
        self._context = zmq.Context()
        self._links: dict[str, _Link] = {}
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def ask_manifest(self, endpoint: str) -> None:
        """Ask for the manifest."""
        link = self._link(endpoint)
        link.send(ManifestWanted(link.hello.nonce))

    def ask_chunk(self, endpoint: str, number: int, name: str, offset: int, size: int, base: Version | None) -> None:
        """Ask for a chunk."""
        link = self._link(endpoint)
        link.send(ChunkWanted(link.hello.nonce, number, name, offset, size, base))

    def _link(self, endpoint: str) -> _Link:
        if endpoint not in self._links:
            self._links[endpoint] = _Link(self._context, endpoint, self._weights, self._keys, self._version)
        return self._links[endpoint]

    def poll(self, timeout_ms: int) -> list[Reply | Gone]:
        """What has come, after at most `timeout_ms`; perhaps nothing, after a `wake`."""
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.dealer, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        ready = dict(poller.poll(timeout_ms))
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        found: list[Reply | Gone] = []
        for endpoint, link in list(self._links.items()):
            if link.dealer in ready:
                found += self._read(endpoint, link)
            if link.monitor in ready:
                event = parse_monitor_message(link.monitor.recv_multipart())["event"]
                found.append(Gone(endpoint, GONE[event]))
        return found

    def _read(self, endpoint: str, link: _Link) -> list[Reply | Gone]:
        found: list[Reply | Gone] = []
        with contextlib.suppress(zmq.Again):
            while len(found) < AT_ONCE:
                header, *content = link.dealer.recv_multipart(zmq.DONTWAIT, copy=False)
                try:
                    found.append(Reply(endpoint, from_server.decode(header.buffer), content[0].buffer if content else memoryview(b"")))
                except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is no UTF-8
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

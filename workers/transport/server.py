"""The coordinator's sockets.

    workers --DEALER--> ROUTER   registration, heartbeats, groups, batches     (CURVE, ZAP allow-list)
    workers <---SUB---- PUB      new versions                                  (CURVE, ZAP allow-list)

Nothing is dropped at a high-water mark: the ROUTER has none, what is in flight is bounded by the workers' capacity. A peer
without the run's key gets nothing and is counted. A peer that is gone is noticed at the next send (ROUTER_MANDATORY). One that
connects again under its routing id takes over from its old connection, even before that one is known to be broken
(ROUTER_HANDOVER).
"""

from __future__ import annotations

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from workers.config import ConfigError, TransportConfig
from workers.messages.codec import MessageError, encode, from_workers
from workers.messages.parts import Message
from workers.transport.keys import KeyPair

MIB = 1 << 20


class PortError(ConfigError):
    """No port of the configured range is free."""


class AllowList:
    """ZAP's question, answered: may the peer with this public key talk to us? Counts refusals."""

    def __init__(self, allowed: bytes) -> None:
        self._allowed = allowed
        self.num_refused = 0

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq's authenticator with the peer's public key (Z85)."""
        if key == self._allowed:
            return True
        self.num_refused += 1
        return False


class ServerSockets:
    """ROUTER and PUB of the coordinator, bound to one interface."""

    def __init__(self, config: TransportConfig, server: KeyPair, client_public: bytes) -> None:
        self._config = config
        self._context = zmq.asyncio.Context()
        self._allow = AllowList(client_public)
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("headway", self._allow)
        self._decoder = from_workers(config.max_message_mb * MIB)
        self.num_malformed = 0
        self._router = self._socket(zmq.ROUTER, server)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._publisher = self._socket(zmq.PUB, server)
        try:
            self.router_endpoint = bind(self._router, config)
            self.publisher_endpoint = bind(self._publisher, config)
        except ConfigError:
            self.close()
            raise

    @property
    def num_refused(self) -> int:
        """Connection attempts without the run's key."""
        return self._allow.num_refused

    def _socket(self, kind: int, keys: KeyPair) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = self._config.max_message_mb * MIB
        socket.zap_domain = b"headway"
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
        return socket

    async def receive(self) -> tuple[bytes, Message | MessageError]:
        """The next message and the peer it came from; a malformed one comes as the error that names what is wrong."""
        peer, *frames = await self._router.recv_multipart()
        try:
            return peer, self._decoder.decode(frames)
        except MessageError as error:
            self.num_malformed += 1
            return peer, error

    async def send(self, peer: bytes, message: Message) -> bool:
        """Send to one peer; false if it is not connected (any more)."""
        try:
            await self._router.send_multipart([peer, *encode(message)], copy=False)
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
        self._authenticator.stop()
        for socket in (getattr(self, "_router", None), getattr(self, "_publisher", None)):
            if socket is not None:
                socket.close(linger=linger_ms)
        self._context.term()


def bind(socket: zmq.Socket, config: TransportConfig) -> str:
    """Bind to a port of `config` on its interface; returns the endpoint. Raises `PortError`, `ConfigError`."""
    for port in config.ports() or ("*",):
        try:
            socket.bind(f"tcp://{config.interface}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                continue
            raise ConfigError(f"transport.interface={config.interface!r}: cannot be bound ({error.strerror}). "
                              "Give an address of this node") from error
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    raise PortError(f"transport.port_range={config.port_range!r}: no port in it is free on {config.interface}. "
                    "Widen the range, or leave it empty to take any free port")

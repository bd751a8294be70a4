"""How strangers are let in, or not: what stands before every socket that a run opens to other nodes.

    anybody --TCP--> stranger --CURVE, the run's keys (or a ticket, tickets.py)--> peer
                       |  has HANDSHAKE_S seconds, and nothing larger than MAX_FRAME is taken of it
                       |  of more than MAX_STRANGERS at a time the silent are turned away, then the oldest

A scanner of ports, or somebody without the keys, costs a descriptor for some seconds, and is counted.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from workers.config import ConfigError, TransportConfig
from workers.messages.codec import MAX_FRAME
from workers.transport.arrivals import Arrivals
from workers.transport.keys import KeyPair
from workers.transport.lasting_thread import LastingThread
from workers.transport.tickets import Tickets

HANDSHAKE_S = 10.0
MAX_STRANGERS = 512
MAX_UNREAD = 1000
"""Messages of one peer that wait to be read; it is read no further until then."""
LOOK_S, TURN_S = 1.0, 0.1
END_S = 10.0
KEYS, TICKETS = "headway", "tickets"
EVENTS = (zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
BYTES = struct.Struct("120xQQ")
"""Of the kernel's struct tcp_info: tcpi_bytes_acked (what we said and was heard), tcpi_bytes_received."""
GREETING = 64
TOLD_TO_PEERS = 100
"""Bytes: more than a stranger is told, whatever it says (ZeroMQ's greeting and a refusal), less than any handshake that succeeds takes of us."""


class PortError(ConfigError):
    """No port of the configured range is free."""


class Door:
    """Guards the sockets of one context. `server`: their keys; `client`: the public key of those that are let in. To be closed before the
    context is."""

    def __init__(self, context: zmq.Context, server: KeyPair, client: bytes) -> None:
        self._context, self._server, self._client = context, server, client
        self.tickets = Tickets()
        self.arrivals = Arrivals(HANDSHAKE_S + LOOK_S)
        raise_limit()
        self._authenticator: ThreadAuthenticator | None = None
        self._authenticate()
        self._monitors: dict[zmq.Socket, zmq.Socket] = {}
        self._open = True
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = LastingThread("door", self._watch)

    def bind(self, sock: zmq.Socket, config: TransportConfig, *, by_ticket: bool = False) -> str:
        """Open `sock` to those that have the key, or, unencrypted, a ticket; returns the endpoint. Raises `PortError`, `ConfigError`."""
        sock.linger, sock.maxmsgsize, sock.rcvhwm, sock.handshake_ivl = 0, MAX_FRAME, MAX_UNREAD, int(HANDSHAKE_S * 1000)
        sock.zap_domain, sock.zap_enforce_domain = (TICKETS if by_ticket else KEYS).encode(), True  # without who checks keys nobody is let in
        if by_ticket:
            sock.plain_server = True
        else:
            sock.curve_server, sock.curve_publickey, sock.curve_secretkey = True, self._server.public, self._server.secret
        address = f"inproc://door-{id(sock)}"
        sock.monitor(address, EVENTS)
        monitor = self._context.socket(zmq.PAIR, socket_class=zmq.Socket)
        monitor.linger = 0
        monitor.connect(address)
        self._monitors = {**self._monitors, monitor: sock}
        os.eventfd_write(self._wake, 1)
        return _bind(sock, config)

    @property
    def num_refused(self) -> int:
        """Connections that ended without having shown a key or a ticket."""
        return self.arrivals.num_refused

    @property
    def num_failures(self) -> int:
        """How often the thread has failed."""
        return self._thread.num_failures

    def callback(self, domain: str, key: bytes) -> bool:
        """ZAP's question, answered: may the peer with this public key (Z85) talk to us?"""
        return domain == KEYS and key == self._client

    def close(self) -> None:
        """Let nobody in any more. Harmless to repeat."""
        if not self._open:
            return
        self._open = False
        os.eventfd_write(self._wake, 1)
        self._thread.join(END_S)
        for monitor, sock in self._monitors.items():
            sock.monitor(None, 0)  # type: ignore[arg-type]
            monitor.close(linger=0)
        os.close(self._wake)
        self._end_authenticator()

    # -- the door's thread -----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        turned_at, put_off = 0.0, False
        while self._open:
            poller = zmq.Poller()
            poller.register(self._wake, zmq.POLLIN)
            for monitor in self._monitors:
                poller.register(monitor, zmq.POLLIN)
            ready = dict(poller.poll(int((TURN_S if put_off else LOOK_S) * 1000)))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            for monitor in ready.keys() & self._monitors.keys():
                self._read(monitor)
            if not (put_off := time.monotonic() - turned_at < TURN_S):
                self._turn_away()
                turned_at = time.monotonic()
            self._authenticate()

    def _read(self, monitor: zmq.Socket) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                event = parse_monitor_message(monitor.recv_multipart(zmq.DONTWAIT))
                if event["event"] == zmq.EVENT_ACCEPTED:
                    self.arrivals.accepted(event["value"], time.monotonic())
                elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self.arrivals.admitted()
                elif event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self.arrivals.denied()
                else:
                    self.arrivals.ended(event["value"])

    def _turn_away(self) -> None:
        young = self.arrivals.young(time.monotonic())
        room = min(MAX_STRANGERS, max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        if len(young) <= room:
            return
        silent: list[int] = []
        strangers: list[int] = []
        for number in young:
            told, said = bytes_exchanged(number)
            if told > TOLD_TO_PEERS:
                self.arrivals.known(number)
            else:
                (strangers if said > GREETING else silent).append(number)
        for number in [*silent, *strangers][: max(0, len(silent) + len(strangers) - room)]:
            _shut(number)

    def _authenticate(self) -> None:
        """Have an authenticator that lives."""
        if self._authenticator is not None and self._authenticator.is_alive():
            return
        if self._authenticator is not None:
            print("warning: what checks keys has ended, and is started again", flush=True)
            self._end_authenticator()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(KEYS, self)
        self._authenticator.passwords[TICKETS] = self.tickets

    def _end_authenticator(self) -> None:
        if self._authenticator is None:
            return
        if not self._authenticator.is_alive() and self._authenticator.pipe is not None:  # it would wait for an answer of the thread that is dead
            self._authenticator.pipe.close(linger=0)
            self._authenticator.pipe = None  # type: ignore[assignment]
            with contextlib.suppress(zmq.ZMQError, AttributeError):  # what is closed gives its name back some time later
                self._authenticator.zap_socket.unbind("inproc://zeromq.zap.01")
        self._authenticator.stop()


def raise_limit() -> None:
    """Have as many descriptors as this process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def bytes_exchanged(number: int) -> tuple[int, int]:
    """What was heard of us over the connection with this descriptor, and what has come over it; 0 where there is none."""
    with contextlib.suppress(OSError, struct.error), _borrowed(number) as connection:
        told, said = BYTES.unpack(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES.size))
        return told, said
    return 0, 0


def _shut(number: int) -> None:
    with contextlib.suppress(OSError), _borrowed(number) as connection:
        connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(number: int) -> Iterator[socket.socket]:
    """The socket with this descriptor, which is ZeroMQ's to close. Raises OSError."""
    connection = socket.socket(fileno=number)
    try:
        yield connection
    finally:
        connection.detach()


def _bind(sock: zmq.Socket, config: TransportConfig) -> str:
    for port in config.ports() or ("*",):
        try:
            sock.bind(f"tcp://{config.interface}:{port}")
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE:
                continue
            raise ConfigError(f"transport.interface={config.interface!r}: cannot be bound ({error.strerror}). "
                              "Give an address of this node") from error
        return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
    raise PortError(f"transport.port_range={config.port_range!r}: no port in it is free on {config.interface}. "
                    "Widen the range, or leave it empty to take any free port")

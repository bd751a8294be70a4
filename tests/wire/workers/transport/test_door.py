"""Strangers before the sockets of a run: what they can cost it, over real TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import psutil
import pytest

from workers.config import TransportConfig
from workers.messages.codec import MAX_PIECE
from workers.messages.from_worker import Draining, Heartbeat
from workers.run.folder import RunFolder
from workers.transport import door
from workers.transport.client import ClientSockets
from workers.transport.keys import read_keys
from workers.transport.rendezvous import Address
from workers.transport.server import ServerSockets

WAIT_S = 120.0
CONFIG = TransportConfig(heartbeat_s=0.1, max_message_mb=256)
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


@pytest.fixture
async def server(run: RunFolder) -> AsyncIterator[ServerSockets]:
    sockets = ServerSockets(CONFIG, read_keys(run, "server"), read_keys(run, "client").public)
    yield sockets
    sockets.close()


@pytest.fixture
def strangers() -> Iterator[list[socket.socket]]:
    connections: list[socket.socket] = []
    yield connections
    for connection in connections:
        connection.close()


def connect(server: ServerSockets, said: bytes = b"") -> socket.socket:
    host, _, port = server.router_endpoint.removeprefix("tcp://").partition(":")
    connection = socket.create_connection((host, int(port)), WAIT_S)
    with contextlib.suppress(ConnectionError):  # it may have been cut off by now
        connection.sendall(said)
    return connection


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def friend_of(run: RunFolder, server: ServerSockets) -> ClientSockets:
    address = Address(1, server.router_endpoint, server.publisher_endpoint)
    return ClientSockets(CONFIG, address, read_keys(run, "server").public, read_keys(run, "client"))


async def hears_a_friend(run: RunFolder, server: ServerSockets) -> bool:
    friend = friend_of(run, server)
    await friend.send(Heartbeat())
    heard = await asyncio.wait_for(server.receive(), WAIT_S)
    friend.close()
    return heard[1] == Heartbeat()


@pytest.mark.parametrize("said", [b"", SIGNATURE, GREETING, GREETING + b"\x04\xff"])
async def test_those_that_say_too_little_are_cut_off_and_counted(run: RunFolder, strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch,
                                                                 said: bytes) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 0.5)
    impatient = ServerSockets(CONFIG, read_keys(run, "server"), read_keys(run, "client").public)
    strangers += [connect(impatient, said) for _ in range(5)]
    await until(lambda: impatient.door.num_refused == 5)
    assert await hears_a_friend(run, impatient)
    impatient.close()


@pytest.mark.parametrize("said", [GREETING, GREETING + b"\x06" + (60_000).to_bytes(8, "big") + bytes(400)], ids=["little", "half_a_frame"])
async def test_very_many_of_them_leave_room_for_friends(run: RunFolder, strangers: list[socket.socket], monkeypatch: pytest.MonkeyPatch,
                                                        said: bytes) -> None:
    monkeypatch.setattr(door, "MAX_STRANGERS", 20)
    monkeypatch.setattr(door, "HANDSHAKE_S", 1000.0)  # it is not by time that they go
    server = ServerSockets(CONFIG, read_keys(run, "server"), read_keys(run, "client").public)
    with contextlib.closing(server), contextlib.closing(friend_of(run, server)) as friend:
        await friend.send(Heartbeat(capacity=1))
        assert (await asyncio.wait_for(server.receive(), WAIT_S))[1] == Heartbeat(capacity=1)
        for number in range(1, 301):
            strangers.append(connect(server, said if number % 2 else b""))
        await until(lambda: server.door.num_refused >= 300 - 20 - 2)  # but for those that are young, friends too
        await friend.send(Heartbeat(capacity=2))  # a friend's connection has not been taken for one of them
        assert (await asyncio.wait_for(server.receive(), WAIT_S))[1] == Heartbeat(capacity=2)
        assert await hears_a_friend(run, server)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_what_checks_keys_is_replaced_when_it_has_died(server: ServerSockets, run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = server.door._authenticator
    assert dead is not None

    async def fails(_: list[bytes]) -> None:
        raise RuntimeError("it fails")

    monkeypatch.setattr(dead, "handle_zap_message", fails)
    with contextlib.closing(friend_of(run, server)) as friend:
        await friend.send(Heartbeat())
        await until(lambda: server.door._authenticator is not dead)
        assert not dead.is_alive() and await hears_a_friend(run, server) and server.door.num_failures == 0


async def test_what_a_stranger_sends_is_not_kept(server: ServerSockets, run: RunFolder, strangers: list[socket.socket]) -> None:
    """A frame of 200 MB before any key has been shown, as large as a message may be, is turned away by its size."""
    before = psutil.Process().memory_info().rss
    frame = b"\x06" + (200 << 20).to_bytes(8, "big")
    for _ in range(4):
        strangers.append(connect(server, GREETING + frame))
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                strangers[-1].sendall(bytes(1 << 20))
    await until(lambda: server.door.num_refused == 4)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert await hears_a_friend(run, server)


async def test_a_message_larger_than_any_frame_may_be_comes_in_pieces(server: ServerSockets, run: RunFolder) -> None:
    friend = friend_of(run, server)
    await friend.send(Draining("x" * (10 * MAX_PIECE)))
    assert (await asyncio.wait_for(server.receive(), WAIT_S))[1] == Draining("x" * (10 * MAX_PIECE))
    friend.close()


async def test_all_descriptors_that_may_be_had_are(server: ServerSockets) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft == hard


async def test_nothing_is_left_open(run: RunFolder) -> None:
    ServerSockets(CONFIG, read_keys(run, "server"), b"").close()  # what Python keeps open for good is
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        ServerSockets(CONFIG, read_keys(run, "server"), b"").close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)

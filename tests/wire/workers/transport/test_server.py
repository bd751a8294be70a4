"""The coordinator's and the workers' sockets over real TCP: who gets in, what gets through, what happens when peers die."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.support.groups import make_group
from workers.config import ConfigError, TransportConfig
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import Finish, HeartbeatReply, VersionAnnounced, Welcome
from workers.messages.from_worker import Goodbye, GroupFinished, Heartbeat, Register
from workers.messages.parts import Announcement, Role, Version
from workers.run import outage
from workers.run.folder import RunFolder, RunFolderError
from workers.transport.client import ClientSockets, CoordinatorLost, NoCoordinator, RunOver, find_coordinator
from workers.transport.door import PortError
from workers.transport.keys import KeyPair, read_keys
from workers.transport.peer import Peer
from workers.transport.rendezvous import Address, publish
from workers.transport.server import ServerSockets

WAIT_S = 120.0
CONFIG = TransportConfig(heartbeat_s=0.1, heartbeat_timeout_s=30.0, max_message_mb=1)


@pytest.fixture
async def server(run: RunFolder) -> AsyncIterator[ServerSockets]:
    sockets = ServerSockets(CONFIG, read_keys(run, "server"), read_keys(run, "client").public)
    publish(run, Address(1, sockets.router_endpoint, sockets.publisher_endpoint))
    yield sockets
    sockets.close()


async def connect(run: RunFolder, keys: KeyPair | None = None, server_public: bytes | None = None) -> ClientSockets:
    address = await find_coordinator(run, WAIT_S)
    return ClientSockets(CONFIG, address, server_public or read_keys(run, "server").public, keys or read_keys(run, "client"))


async def test_both_ways_and_to_all(run: RunFolder, server: ServerSockets) -> None:
    client = await connect(run)
    group = make_group()
    await client.send(GroupFinished(group))
    peer, message = await asyncio.wait_for(server.receive(), WAIT_S)
    assert isinstance(message, GroupFinished) and message.group.tokens.tolist() == group.tokens.tolist()
    assert await server.send(peer, Finish("because"))
    assert await asyncio.wait_for(client.receive(), WAIT_S) == Finish("because")
    announced = VersionAnnounced(Announcement(Version(1, 3), "/weights", "digest"))

    async def publish_until_heard() -> None:  # a subscription takes a moment to arrive
        while True:
            await server.publish(announced)
            await asyncio.sleep(0.05)

    publishing = asyncio.create_task(publish_until_heard())
    assert await asyncio.wait_for(client.receive_published(), WAIT_S) == announced
    publishing.cancel()
    client.close()


async def test_a_peer_with_another_key_gets_nothing_and_is_counted(run: RunFolder, server: ServerSockets) -> None:
    stranger = await connect(run, KeyPair(*zmq.curve_keypair()))
    friend = await connect(run)
    await stranger.send(Register(Role.rollout, "evil", 1))
    deadline = time.monotonic() + WAIT_S
    while server.door.num_refused == 0:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await friend.send(Heartbeat())
    _, message = await asyncio.wait_for(server.receive(), WAIT_S)
    assert message == Heartbeat(), "only the friend's message arrives"
    stranger.close()
    friend.close()


async def test_a_plain_peer_without_encryption_gets_nothing(run: RunFolder, server: ServerSockets) -> None:
    context = zmq.asyncio.Context()
    plain = context.socket(zmq.DEALER)
    plain.linger = 0
    plain.connect(server.router_endpoint)
    await plain.send_multipart([b"\x81\xa4type\xa7Goodbye"])
    friend = await connect(run)
    await friend.send(Heartbeat())
    _, message = await asyncio.wait_for(server.receive(), WAIT_S)
    assert message == Heartbeat()
    friend.close()
    plain.close()
    context.term()


async def test_a_client_does_not_talk_to_a_false_server(run: RunFolder, server: ServerSockets) -> None:
    client = await connect(run, server_public=zmq.curve_keypair()[0])
    await client.send(Goodbye())
    friend = await connect(run)
    await friend.send(Heartbeat())
    _, message = await asyncio.wait_for(server.receive(), WAIT_S)
    assert message == Heartbeat()
    client._dealer.linger = 0
    client.close()
    friend.close()


async def test_a_malformed_message_is_an_error_not_a_crash(run: RunFolder, server: ServerSockets) -> None:
    client = await connect(run)
    await client._dealer.send_multipart([b"nonsense", b"more"])
    _, error = await asyncio.wait_for(server.receive(), WAIT_S)
    assert isinstance(error, MessageError) and server.num_malformed == 1
    await client.send(Heartbeat())
    assert (await asyncio.wait_for(server.receive(), WAIT_S))[1] == Heartbeat()
    client.close()


async def test_an_oversized_frame_never_arrives_and_the_peer_can_go_on(run: RunFolder, server: ServerSockets) -> None:
    client = await connect(run)
    await client._dealer.send_multipart([b"x" * (2 << 20)])  # the connection is cut at 1 MiB and made again
    received = asyncio.create_task(server.receive())
    deadline = time.monotonic() + WAIT_S
    while not received.done():
        assert time.monotonic() < deadline
        await client.send(Heartbeat())
        await asyncio.sleep(0.05)
    assert received.result()[1] == Heartbeat()
    client.close()


async def test_sending_to_a_dead_peer_says_so(run: RunFolder, server: ServerSockets) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from workers.run.folder import RunFolder
from workers.messages.from_worker import Heartbeat
from tests.wire.workers.transport.test_server import connect
async def main():
    client = await connect(RunFolder(Path({str(run.path)!r})))
    await client.send(Heartbeat())
    await asyncio.Event().wait()
asyncio.run(main())
"""
    child = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[4])
    peer, _ = await asyncio.wait_for(server.receive(), WAIT_S)
    assert await server.send(peer, Finish(""))
    child.send_signal(signal.SIGKILL)
    child.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while await server.send(peer, Finish("")):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_one_that_comes_back_takes_over_from_its_old_connection(run: RunFolder, server: ServerSockets) -> None:
    address, keys = await find_coordinator(run, WAIT_S), read_keys(run, "client")
    old = ClientSockets(CONFIG, address, read_keys(run, "server").public, keys, b"worker")
    await old.send(Heartbeat(capacity=1))
    assert await asyncio.wait_for(server.receive(), WAIT_S) == (b"worker", Heartbeat(capacity=1))
    new = ClientSockets(CONFIG, address, read_keys(run, "server").public, keys, b"worker")  # the old connection still stands
    await new.send(Heartbeat(capacity=2))
    assert await asyncio.wait_for(server.receive(), WAIT_S) == (b"worker", Heartbeat(capacity=2))
    assert await server.send(b"worker", Finish("to the new one"))
    assert await asyncio.wait_for(new.receive(), WAIT_S) == Finish("to the new one")
    old.close(linger_ms=0)
    new.close()


class Host:
    """A minimal coordinator for `Peer`: answers registrations and heartbeats."""

    def __init__(self, server: ServerSockets) -> None:
        self.server, self.known = server, True
        self.received: list = []
        self.peer = b""
        self.task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while True:
            self.peer, message = await self.server.receive()
            self.received.append(message)
            if isinstance(message, Register):
                self.known = True
                await self.server.send(self.peer, Welcome(1, None))
            elif isinstance(message, Heartbeat):
                await self.server.send(self.peer, HeartbeatReply(Announcement(Version(1, 5), "/w", "d"), self.known))


async def test_a_peer_registers_hears_versions_and_registers_again_when_forgotten(run: RunFolder, server: ServerSockets) -> None:
    host, announced = Host(server), asyncio.Event()
    versions: list[Version] = []

    def on_announcement(announcement: Announcement) -> None:
        versions.append(announcement.version)
        announced.set()

    peer = Peer(run, CONFIG, Role.rollout, 30.0, heartbeat=Heartbeat, on_message=lambda _: None, on_announcement=on_announcement)
    async with peer:
        serving = asyncio.create_task(peer.serve())
        await asyncio.wait_for(peer.welcomed(), WAIT_S)
        await asyncio.wait_for(announced.wait(), WAIT_S)
        host.known = False
        deadline = time.monotonic() + WAIT_S
        while sum(isinstance(message, Register) for message in host.received) < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await server.send(host.peer, Finish("enough"))
        assert await asyncio.wait_for(serving, WAIT_S) == "enough"
    assert versions == [Version(1, 5)], "the same version is announced once"
    host.task.cancel()


async def test_a_silent_coordinator_is_noticed(run: RunFolder, server: ServerSockets) -> None:
    peer = Peer(run, CONFIG, Role.rollout, 0.5, heartbeat=Heartbeat, on_message=lambda _: None, on_announcement=lambda _: None)
    async with peer:
        with pytest.raises(NoCoordinator, match="silent"):
            await asyncio.wait_for(peer.serve(), WAIT_S)


async def test_the_record_of_the_end_is_believed_when_the_coordinator_is_silent(run: RunFolder, server: ServerSockets) -> None:
    peer = Peer(run, CONFIG, Role.rollout, 1000.0, heartbeat=Heartbeat, on_message=lambda _: None, on_announcement=lambda _: None)
    run.end("power cut", "test")
    async with peer:
        assert await asyncio.wait_for(peer.serve(), WAIT_S) == "power cut"


async def test_no_coordinator_in_time_is_an_error_that_says_where_to_look(run: RunFolder) -> None:
    with pytest.raises(NoCoordinator, match="training job's log"):
        await find_coordinator(run, 0.2)


async def test_who_waits_for_a_coordinator_waits_for_the_run_folder_too(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    away = run.path.with_name("away")
    run.path.rename(away)
    with pytest.raises(FileNotFoundError):  # with run.outage_minutes=0
        await find_coordinator(run, WAIT_S)
    finding, told = asyncio.create_task(find_coordinator(run.patient(2 * WAIT_S / 60), WAIT_S)), ""
    while "Waiting for it, 240 s at most (run.outage_minutes)" not in told:
        told += capsys.readouterr().out
        await asyncio.sleep(0.01)
    away.rename(run.path)
    publish(run, Address(1, "tcp://127.0.0.1:1", "tcp://127.0.0.1:2"))
    assert (await asyncio.wait_for(finding, WAIT_S)).router == "tcp://127.0.0.1:1"


async def test_who_follows_needs_the_keys_of_the_run_folder_once(run: RunFolder, server: ServerSockets) -> None:
    peer = Peer(run, CONFIG, Role.rollout, WAIT_S, heartbeat=Heartbeat, on_message=lambda message: None, on_announcement=lambda newer: None)
    await peer.connect()
    run.keys.rename(run.path / "elsewhere")
    await peer._connect(Address(2, server.router_endpoint, server.publisher_endpoint))
    await peer.send(Heartbeat(capacity=7))
    while (await asyncio.wait_for(server.receive(), WAIT_S))[1] != Heartbeat(capacity=7):
        pass  # its Registers
    await peer.leave()


async def test_keys_are_waited_for_as_the_run_folder_is(run: RunFolder, server: ServerSockets, monkeypatch: pytest.MonkeyPatch) -> None:
    read, errors = Path.read_bytes, [errno.EIO, errno.ESTALE]

    def read_bytes(path: Path) -> bytes:
        if errors and path.parent == run.keys:
            raise OSError(errors.pop(), "it is away")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(outage, "NEXT_S", 0.0)
    with pytest.raises(OSError, match="it is away"):  # with run.outage_minutes=0
        read_keys(run, "client")
    peer = Peer(run.patient(1.0), CONFIG, Role.rollout, WAIT_S, heartbeat=Heartbeat, on_message=lambda _: None, on_announcement=lambda _: None)
    async with peer:
        assert not errors


async def test_a_peer_that_cannot_go_over_to_a_newer_coordinator_stays_with_the_old_one(run: RunFolder, server: ServerSockets) -> None:
    peer = Peer(run, CONFIG, Role.rollout, WAIT_S, heartbeat=Heartbeat, on_message=lambda message: None, on_announcement=lambda newer: None)
    await peer.connect()
    with pytest.raises(zmq.ZMQError):
        await peer._connect(Address(2, "nowhere", "tcp://127.0.0.1:2"))
    await peer.send(Heartbeat(capacity=7))
    while (await asyncio.wait_for(server.receive(), WAIT_S))[1] != Heartbeat(capacity=7):
        pass  # its Register
    await peer.leave()


async def test_nobody_waits_for_a_coordinator_of_a_run_that_is_over(run: RunFolder) -> None:
    run.request_stop("enough")
    with pytest.raises(RunOver, match="has ended: stopped: enough"):
        await find_coordinator(run, WAIT_S)
    run.end("a fault", "test")
    with pytest.raises(RunOver) as caught:
        await find_coordinator(run, WAIT_S)
    assert caught.value.cause == "a fault" and isinstance(caught.value, CoordinatorLost)


async def test_the_newest_epoch_is_taken(run: RunFolder) -> None:
    for epoch in (2, 10, 9):
        publish(run, Address(epoch, f"tcp://router-{epoch}", "tcp://publisher"))
    assert (await find_coordinator(run, 1.0)).epoch == 10
    with pytest.raises(FileExistsError):
        publish(run, Address(10, "tcp://usurper", "tcp://publisher"))


async def test_no_free_port_in_the_range_is_an_error(run: RunFolder) -> None:
    keys = read_keys(run, "server")
    free = ServerSockets(CONFIG, keys, b"")
    port = free.router_endpoint.rsplit(":", 1)[1]
    with pytest.raises(PortError, match="no port in it is free"):
        ServerSockets(TransportConfig(port_range=f"{port}-{port}"), keys, b"")
    free.close()


async def test_ports_come_from_the_range(run: RunFolder) -> None:
    probe = ServerSockets(CONFIG, read_keys(run, "server"), b"")
    first = int(probe.router_endpoint.rsplit(":", 1)[1])
    probe.close()
    last = min(65535, first + 50)
    sockets = ServerSockets(TransportConfig(port_range=f"{first}-{last}"), read_keys(run, "server"), b"")
    assert all(first <= int(endpoint.rsplit(":", 1)[1]) <= last for endpoint in (sockets.router_endpoint, sockets.publisher_endpoint))
    sockets.close()


async def test_an_interface_that_is_not_ours_is_an_error(run: RunFolder) -> None:
    with pytest.raises(ConfigError, match="transport.interface"):
        ServerSockets(TransportConfig(interface="203.0.113.7"), read_keys(run, "server"), b"")


def test_keys_are_private_and_checked(run: RunFolder) -> None:
    assert (run.keys / "server").stat().st_mode & 0o777 == 0o600
    assert read_keys(run, "server").public != read_keys(run, "client").public
    os.chmod(run.keys / "server", 0o640)
    with pytest.raises(RunFolderError, match="chmod 600"):
        read_keys(run, "server")
    (run.keys / "client").write_text("nonsense nonsense")
    with pytest.raises(RunFolderError, match="not a key pair"):
        read_keys(run, "client")

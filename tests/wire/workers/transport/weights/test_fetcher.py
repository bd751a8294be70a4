"""Weights over real TCP: who gets them, from whom, and what happens when processes die, lie, fall silent or run out of memory."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from tests.support.small_disk import small_disk
from tests.wire.weight_nodes import CHUNK, CONFIG, LOOPBACK, NAMES, WAIT_S, Origin, Process, Worker, make_weights, read, step, write
from workers.config import TransportConfig
from workers.config.choices import Security
from workers.config.training import WeightsConfig
from workers.messages.parts import Announcement, Version
from workers.run.digests import digest_of
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys
from workers.transport.weights.fetch_plan import MAX_CORRUPT
from workers.transport.weights.fetcher import Cancelled, FetchProgress
from workers.transport.weights.messages import (
    ALL,
    ChunkWanted,
    Content,
    ManifestWanted,
    Ticket,
    TicketWanted,
    Unavailable,
    WeightKeys,
    WeightMessage,
    encode,
    from_server,
)
from workers.transport.weights.server import ServerCounters, WeightServer
from workers.weights.manifest import MANIFEST, Manifest, WeightsError, describe_files

VERSION, NEXT = Version(1, 1), Version(1, 2)
WEIGHTS = make_weights(1)
SIZE = WEIGHTS.nbytes
NUM_CHUNKS = 2 * -(-SIZE // 2 // CHUNK)
IMPATIENT = WeightsConfig(chunk_mb=1, timeout_s=32.0)


@pytest.fixture
def origin(run: RunFolder, tmp_path: Path) -> Iterator[Origin]:
    origin = Origin(run, tmp_path / "trainer")
    yield origin
    origin.close()


@pytest.fixture
def make_worker(run: RunFolder, tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(name: str, config: WeightsConfig = CONFIG) -> Worker:
        workers.append(Worker(run, tmp_path / name, config))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Half:
    """A worker that got the first `num_chunks` of a version, and is to get the others when told."""

    def __init__(self, worker: Worker, origin: Origin, announcement: Announcement, num_chunks: int) -> None:
        folder = origin.store.published(announcement.version)
        self.incoming = worker.store.begin((folder / MANIFEST).read_bytes(), announcement.version)
        self._folder = folder
        worker.server.offer_incoming(self.incoming)
        self.give(num_chunks)

    def give(self, num_chunks: int) -> None:
        for chunk in self.incoming.missing()[:num_chunks]:
            content = (self._folder / chunk.name).read_bytes()[chunk.offset: chunk.offset + chunk.size]
            self.incoming.write(chunk, content)


class Arrived:
    """Told how a fetch comes on; `at_least` waits until so many bytes are there."""

    def __init__(self) -> None:
        self._arrived, self._changed = 0, threading.Condition()

    def __call__(self, progress: FetchProgress) -> None:
        with self._changed:
            self._arrived = progress.arrived
            self._changed.notify_all()

    def at_least(self, size: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived >= size, WAIT_S)


# -- who has what ----------------------------------------------------------------------------------------------------------

def test_a_version_comes_from_the_trainer(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    announcement, worker = origin.publish(VERSION, WEIGHTS), make_worker("node")
    folder = worker.fetch(announcement)
    assert folder == worker.store.held(VERSION) and np.array_equal(read(folder), WEIGHTS)
    assert (worker.progress.size, worker.progress.arrived, worker.progress.received, worker.progress.failures) == (SIZE, SIZE, SIZE, [])
    counters = origin.server.counters
    assert (counters.num_fetchers, counters.chunks_sent, counters.num_refused, counters.num_malformed) == (1, NUM_CHUNKS, 0, 0)
    assert counters.bytes_sent == SIZE + len((folder / MANIFEST).read_bytes())
    assert worker.fetch(announcement) == folder and origin.server.counters.num_fetchers == 1, "what is here is not fetched again"


def test_no_connection_is_opened_that_nothing_comes_over(run: RunFolder, tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    """One that is closed in its handshake would count as a stranger's."""
    config = replace(CONFIG, streams=8)
    origin = Origin(run, tmp_path / "trainer", config=config)
    try:
        worker, small = make_worker("node", config), make_weights(1, 1000)
        for number in range(4):
            assert np.array_equal(read(worker.fetch(origin.publish(Version(1, number), small))), small)
        deadline = time.monotonic() + WAIT_S
        while (connected := origin.server.counters.num_connections) < 4 * 3:
            assert time.monotonic() < deadline, connected
            time.sleep(0.01)
        assert (connected, origin.server.counters.chunks_sent, origin.server.counters.num_refused) == (4 * 3, 4 * 2, 0)
    finally:
        origin.close()


@pytest.mark.parametrize(("security", "others"), [(Security.digest, 1), (Security.curve, 0)])
def test_chunks_come_over_as_many_connections_as_streams(run: RunFolder, tmp_path: Path, make_worker: Callable[..., Worker], security: Security,
                                                         others: int) -> None:
    config = replace(CONFIG, security=security, streams=3)
    origin = Origin(run, tmp_path / "trainer", config=config)
    try:
        worker = make_worker("node", config)
        assert np.array_equal(read(worker.fetch(origin.publish(VERSION, WEIGHTS))), WEIGHTS)
        deadline = time.monotonic() + WAIT_S  # the door hears of them a little later
        while (connected := origin.server.counters.num_connections) < 3 + others:
            assert time.monotonic() < deadline, connected
            time.sleep(0.01)
        assert (connected, origin.server.counters.num_fetchers, origin.server.counters.chunks_sent) == (3 + others, 1, NUM_CHUNKS)
    finally:
        origin.close()


def test_each_rank_of_the_trainer_gives_its_own_files(run: RunFolder, tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    ranks = [Origin(run, tmp_path / f"rank-{number}", names=[name]) for number, name in enumerate(NAMES)]
    folders = [rank.write(VERSION, part) for rank, part in zip(ranks, np.array_split(WEIGHTS, 2), strict=True)]
    entries = [describe_files(folder, rank.names, CHUNK, number)[0] for number, (folder, rank) in enumerate(zip(folders, ranks, strict=True))]
    content = Manifest(VERSION, CHUNK, entries).encode()
    for number, (folder, rank) in enumerate(zip(folders, ranks, strict=True)):
        rank.server.offer(VERSION, folder, None if number else content)
    announcement = Announcement(VERSION, "", digest_of(content), [rank.server.endpoint for rank in ranks])
    assert np.array_equal(read(make_worker("node").fetch(announcement)), WEIGHTS)
    assert [rank.server.counters.chunks_sent for rank in ranks] == [NUM_CHUNKS // 2] * 2
    for rank in ranks:
        rank.close()


def test_chunks_are_handed_on_as_they_arrive(origin: Origin, make_worker: Callable[..., Worker], pool: ThreadPoolExecutor) -> None:
    """A chain of three, asked from its end: the trainer gives everything once."""
    announcement, chain = origin.publish(VERSION, WEIGHTS), [make_worker(f"node-{number}") for number in range(3)]
    for worker in chain:
        worker.server.expect(VERSION)
    fetches = [pool.submit(worker.fetch, announcement, [parent.endpoint]) for parent, worker in itertools.pairwise(chain)]
    fetches.append(pool.submit(chain[0].fetch, announcement))
    for fetched in fetches:
        assert np.array_equal(read(fetched.result(WAIT_S)), WEIGHTS)
    servers = [origin.server, *(worker.server for worker in chain)]
    assert [server.counters.chunks_sent for server in servers] == [NUM_CHUNKS, NUM_CHUNKS, NUM_CHUNKS, 0]


def test_a_child_has_what_its_parent_has_and_not_more(origin: Origin, make_worker: Callable[..., Worker], pool: ThreadPoolExecutor) -> None:
    announcement, parent, child, arrived = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child"), Arrived()
    half = Half(parent, origin, announcement, 20)
    fetched = pool.submit(child.fetch, announcement, [parent.endpoint], arrived)
    arrived.at_least(20 * CHUNK)
    assert parent.server.counters.chunks_sent == 20 and not fetched.done()
    half.give(NUM_CHUNKS)
    assert np.array_equal(read(fetched.result(WAIT_S)), WEIGHTS) and origin.server.counters.bytes_sent == 0


def test_two_workers_of_a_node_fetch_once(run: RunFolder, origin: Origin, tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    announcement, workers = origin.publish(VERSION, WEIGHTS), [Worker(run, tmp_path / "node") for _ in range(2)]
    folders = list(pool.map(lambda worker: worker.fetch(announcement), workers))
    assert folders[0] == folders[1] and np.array_equal(read(folders[0]), WEIGHTS)
    assert origin.server.counters.chunks_sent == NUM_CHUNKS and origin.server.counters.num_fetchers == 1
    workers[0].close()
    assert folders[1].is_dir()
    workers[1].close()
    assert not (tmp_path / "node").exists()


def test_one_that_does_not_read_slows_nobody(run: RunFolder, origin: Origin, make_worker: Callable[..., Worker]) -> None:
    announcement = origin.publish(VERSION, WEIGHTS)
    with Dealer(origin.server, WeightKeys.read(run)) as slow:
        bulk = slow.admitted()
        for number in range(2000):  # far more than fits into any buffer underway
            bulk.send(encode(ChunkWanted(VERSION, number, NAMES[0], 0, SIZE // 2)))
        assert np.array_equal(read(make_worker("node").fetch(announcement)), WEIGHTS)
        assert isinstance(received(bulk), Content)  # and it has not been forgotten


# -- processes that die ----------------------------------------------------------------------------------------------------

SERVE_HALF = """
from tests.wire.workers.transport.weights.test_fetcher import Half
from types import SimpleNamespace
half = Half(worker, SimpleNamespace(store=SimpleNamespace(published=lambda _: Path({folder!r}))), SimpleNamespace(version=Version(1, 1)), 20)
print("serving", flush=True)
"""


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_parent_that_dies_in_mid_transfer(run: RunFolder, origin: Origin, tmp_path: Path, make_worker: Callable[..., Worker],
                                            pool: ThreadPoolExecutor, death: signal.Signals) -> None:
    """What came of it is kept, the rest comes from the trainer. A stopped process breaks no connection: its silence is noticed."""
    announcement, child, arrived = origin.publish(VERSION, WEIGHTS), make_worker("child", IMPATIENT if death is signal.SIGSTOP else CONFIG), Arrived()
    parent = Process(run, tmp_path / "parent", SERVE_HALF.format(folder=str(origin.store.published(VERSION))))
    assert parent.line() == "serving"
    fetched = pool.submit(child.fetch, announcement, [parent.endpoint], arrived)
    arrived.at_least(20 * CHUNK)
    parent.process.send_signal(death)
    assert np.array_equal(read(fetched.result(WAIT_S)), WEIGHTS)
    assert origin.server.counters.chunks_sent == NUM_CHUNKS - 20
    assert child.progress.failures == [f"{parent.endpoint}: {'the connection broke' if death is signal.SIGKILL else 'silent for 8 s'}"]
    parent.kill()


def test_another_process_goes_on_where_a_fetcher_was_killed(run: RunFolder, origin: Origin, tmp_path: Path,
                                                            make_worker: Callable[..., Worker]) -> None:
    announcement, parent = origin.publish(VERSION, WEIGHTS), make_worker("parent")
    Half(parent, origin, announcement, 20)
    fetcher = Process(run, tmp_path / "node", f"""
def report(progress):
    if progress.arrived >= 20 * CHUNK:
        print("half", flush=True)
worker.fetch(Announcement(Version(1, 1), "", {announcement.digest!r}, {announcement.sources!r}), [{parent.endpoint!r}], report)
""")
    assert fetcher.line() == "half"
    fetcher.kill()
    successor = make_worker("node")
    assert np.array_equal(read(successor.fetch(announcement)), WEIGHTS)
    assert successor.progress.resumed == 20 * CHUNK and origin.server.counters.chunks_sent == NUM_CHUNKS - 20


def test_one_that_waits_takes_over_when_the_fetcher_of_its_node_is_killed(run: RunFolder, origin: Origin, tmp_path: Path, pool: ThreadPoolExecutor,
                                                                          make_worker: Callable[..., Worker]) -> None:
    announcement, parent = origin.publish(VERSION, WEIGHTS), make_worker("parent")
    Half(parent, origin, announcement, 20)
    fetcher = Process(run, tmp_path / "node", f"""
def report(progress):
    if progress.arrived >= 20 * CHUNK:
        print("half", flush=True)
worker.fetch(Announcement(Version(1, 1), "", {announcement.digest!r}, {announcement.sources!r}), [{parent.endpoint!r}], report)
""")
    assert fetcher.line() == "half"
    waiting = pool.submit(make_worker("node").fetch, announcement)
    fetcher.kill()
    assert np.array_equal(read(waiting.result(WAIT_S)), WEIGHTS) and origin.server.counters.chunks_sent == NUM_CHUNKS - 20


def test_a_server_that_is_not_there_any_more(run: RunFolder, origin: Origin, tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    gone = Process(run, tmp_path / "gone", "")
    gone.end()
    announcement, worker = origin.publish(VERSION, WEIGHTS), make_worker("node")
    worker.fetch(announcement, [gone.endpoint])
    assert worker.progress.failures == [f"{gone.endpoint}: cannot be reached"]


def test_when_all_sources_fail_each_cause_is_named(run: RunFolder, origin: Origin, tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    gone, ignorant, worker = Process(run, tmp_path / "gone", ""), make_worker("ignorant"), make_worker("node")
    gone.end()
    announcement = Announcement(VERSION, "", "0" * 64, [origin.server.endpoint])
    with pytest.raises(WeightsError, match="version 1.1 cannot be fetched: no source has its manifest") as caught:
        worker.fetch(announcement, [gone.endpoint, ignorant.endpoint])
    assert f"{gone.endpoint}: cannot be reached; {ignorant.endpoint}: version 1.1 is not here; {origin.server.endpoint}: version" in str(caught.value)
    with pytest.raises(WeightsError, match="No source was named"):
        worker.fetch(Announcement(VERSION, "", "0" * 64))


def test_a_version_that_is_withdrawn_in_mid_transfer(origin: Origin, make_worker: Callable[..., Worker], pool: ThreadPoolExecutor) -> None:
    announcement, parent, child, arrived = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child"), Arrived()
    Half(parent, origin, announcement, 20)
    fetched = pool.submit(child.fetch, announcement, [parent.endpoint], arrived)
    arrived.at_least(20 * CHUNK)
    parent.server.withdraw(VERSION)
    assert np.array_equal(read(fetched.result(WAIT_S)), WEIGHTS)
    assert child.progress.failures == [f"{parent.endpoint}: version 1.1 is not here"]
    origin.server.withdraw(VERSION)
    with pytest.raises(WeightsError, match="version 1.1 is not here"):
        make_worker("late").fetch(announcement)


def test_what_is_served_outlasts_its_removal(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    announcement = origin.publish(VERSION, WEIGHTS)
    shutil.rmtree(origin.store.published(VERSION))
    assert np.array_equal(read(make_worker("node").fetch(announcement)), WEIGHTS)


def test_a_fetch_that_is_not_wanted_any_more_ends_and_can_be_gone_on_with(origin: Origin, make_worker: Callable[..., Worker],
                                                                        pool: ThreadPoolExecutor) -> None:
    announcement, parent, child, arrived = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child"), Arrived()
    half = Half(parent, origin, announcement, 20)
    fetched = pool.submit(child.fetch, announcement, [parent.endpoint], arrived)
    arrived.at_least(20 * CHUNK)
    child.cancelled.set()
    with pytest.raises(Cancelled, match="version 1.1 is not wanted any more"):
        fetched.result(WAIT_S)
    half.give(NUM_CHUNKS)  # whoever asked for the rest is not there any more
    child.cancelled.clear()
    assert np.array_equal(read(child.fetch(announcement, [parent.endpoint])), WEIGHTS) and child.progress.resumed == 20 * CHUNK
    assert child.progress.failures == [] and origin.server.counters.chunks_sent == 0


# -- wrong bytes -----------------------------------------------------------------------------------------------------------

def spoil(folder: Path, *numbers: int) -> None:
    """Change a byte of some chunks of the first file."""
    with (folder / NAMES[0]).open("r+b") as file:
        for number in numbers:
            file.seek(number * CHUNK + 7)
            old = file.read(1)
            file.seek(number * CHUNK + 7)
            file.write(bytes([old[0] ^ 1]))


def test_a_wrong_chunk_is_asked_for_elsewhere(origin: Origin, make_worker: Callable[..., Worker], capsys: pytest.CaptureFixture) -> None:
    announcement, parent, child = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child")
    spoil(parent.fetch(announcement), 3)
    before = origin.server.counters.chunks_sent
    assert np.array_equal(read(child.fetch(announcement, [parent.endpoint])), WEIGHTS)
    assert child.progress.num_corrupt == 1 and origin.server.counters.chunks_sent == before + 1
    assert f"from {parent.endpoint}: {NAMES[0]}: chunk 3 of version 1.1 is not what was announced" in capsys.readouterr().out


def test_a_source_of_many_wrong_chunks_is_given_up(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    announcement, parent, child = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child")
    spoil(parent.fetch(announcement), *range(20))
    assert np.array_equal(read(child.fetch(announcement, [parent.endpoint])), WEIGHTS)
    assert child.progress.failures == [f"{parent.endpoint}: sends what was not announced"] and child.progress.num_corrupt >= 3


def test_when_nobody_has_the_right_bytes_nothing_is_held(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    announcement, parent, child = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child")
    spoil(parent.fetch(announcement), 3)
    spoil(origin.store.published(VERSION), 3)
    with pytest.raises(WeightsError, match=rf"version 1\.1 cannot be fetched: no source is left for chunk 3 of {NAMES[0]}"):
        child.fetch(announcement, [parent.endpoint])
    assert not child.store.is_held(VERSION) and child.progress.num_corrupt == 2 * MAX_CORRUPT


def test_a_forged_manifest_is_not_believed(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    announcement, liar, child = origin.publish(VERSION, WEIGHTS), make_worker("liar"), make_worker("child")
    other = write(liar.store.published(VERSION), make_weights(2))
    liar.server.offer(VERSION, other, Manifest(VERSION, CHUNK, describe_files(other, NAMES, CHUNK)).encode())
    assert np.array_equal(read(child.fetch(announcement, [liar.endpoint])), WEIGHTS)
    assert child.progress.failures == [f"{liar.endpoint}: sent a manifest that is not the announced one"]


# -- who gets in -----------------------------------------------------------------------------------------------------------

class Dealer:
    """Bare sockets to a server, that say what a fetcher would not."""

    def __init__(self, server: WeightServer, keys: WeightKeys) -> None:
        self.server, self.context = server, zmq.Context()
        self.control = self.context.socket(zmq.DEALER)
        self.control.rcvtimeo = int(WAIT_S * 1000)
        self.control.curve_serverkey = keys.server.public
        self.control.curve_publickey, self.control.curve_secretkey = keys.client.public, keys.client.secret
        self.control.connect(server.endpoint)

    def __enter__(self) -> Dealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def ask(self, message: WeightMessage) -> Content | Unavailable | Ticket:
        self.control.send(encode(message))
        return received(self.control)

    def ticket(self) -> Ticket:
        ticket = self.ask(TicketWanted())
        assert isinstance(ticket, Ticket)
        return ticket

    def bulk(self, ticket: Ticket) -> zmq.Socket:
        """A plain connection with this ticket."""
        socket = self.context.socket(zmq.DEALER)
        socket.rcvtimeo, socket.reconnect_ivl = int(WAIT_S * 1000), -1
        socket.plain_username, socket.plain_password = ticket.name.encode(), ticket.secret.encode()
        socket.connect(f"tcp://127.0.0.1:{ticket.port}")
        return socket

    def admitted(self) -> zmq.Socket:
        return self.bulk(self.ticket())

    def is_let_in(self, ticket: Ticket) -> bool:
        """Whether a connection with this ticket comes about."""
        socket = self.bulk(ticket)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        assert monitor.poll(WAIT_S * 1000)
        return parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED


def received(socket: zmq.Socket) -> Content | Unavailable | Ticket:
    return from_server.decode(socket.recv_multipart()[0])


def test_a_ticket_is_good_once_and_for_one_server(run: RunFolder, origin: Origin, make_worker: Callable[..., Worker]) -> None:
    origin.publish(VERSION, WEIGHTS)
    keys, elsewhere = WeightKeys.read(run), make_worker("elsewhere").server
    with Dealer(origin.server, keys) as dealer, Dealer(elsewhere, keys) as other:
        ticket = dealer.ticket()
        assert not dealer.is_let_in(Ticket(other.ticket().port, ticket.name, ticket.secret))
        assert dealer.is_let_in(ticket) and not dealer.is_let_in(ticket)
        guessed = dealer.ticket()
        assert not dealer.is_let_in(Ticket(guessed.port, guessed.name, "0" * 64)) and not dealer.is_let_in(guessed), "nobody may guess twice"
        bulk = dealer.admitted()
        bulk.send(encode(ChunkWanted(VERSION, 7, NAMES[0], 0, CHUNK)))
        assert received(bulk) == Content(7)


def test_without_a_ticket_nothing_can_be_said(run: RunFolder, origin: Origin) -> None:
    """Neither with none at all nor in the clear to the encrypted socket; what is never taken in takes no memory, however much it is."""
    announcement = origin.publish(VERSION, WEIGHTS)
    with Dealer(origin.server, WeightKeys.read(run)) as dealer:
        port = dealer.ticket().port
        for endpoint in (f"tcp://127.0.0.1:{port}", announcement.sources[0]):
            plain = dealer.context.socket(zmq.DEALER)
            plain.linger, plain.reconnect_ivl, plain.sndhwm = 0, -1, 0
            monitor = plain.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            plain.connect(endpoint)
            with contextlib.suppress(zmq.Again):  # it is cut off already
                for part in range(100):
                    plain.send(bytes(60_000), zmq.DONTWAIT | (zmq.SNDMORE if part < 99 else 0))
            assert monitor.poll(WAIT_S * 1000)
    assert origin.server.counters.num_malformed == 0


def strangers_keys(tmp_path: Path) -> WeightKeys:
    other = RunFolder.create(tmp_path / "another run")
    make_keys(other)
    return WeightKeys.read(other)


@pytest.mark.parametrize("content", [[b"nonsense"], [b""], [b"\x81\xa4type\xacTicketWanted", b"x"], [b"\x81\xa4type\xa3\xff\xfe\xfd"], [b"x", b"y"],
                                     [b"\x82\xa1x" + b"\x91" * 50_000]])
def test_what_is_malformed_is_counted_and_nothing_else(run: RunFolder, origin: Origin, content: list[bytes]) -> None:
    origin.publish(VERSION, WEIGHTS)
    with Dealer(origin.server, WeightKeys.read(run)) as dealer:
        bulk = dealer.admitted()
        for socket in (dealer.control, bulk):
            socket.send_multipart(content)
            socket.send(encode(ChunkWanted(VERSION, 7, NAMES[0], 0, CHUNK)))
            assert received(socket) == Content(7)
    assert (origin.server.counters.num_malformed, origin.server.counters.num_failures) == (2, 0)


@pytest.mark.parametrize("wanted", [("../trainer/in_use", 0, 4), (MANIFEST, 0, 4), (NAMES[0], 0, SIZE), (NAMES[0], SIZE, 4), (NAMES[0], 0, 0),
                                    ("x", 0, 4)])
def test_only_what_is_offered_can_be_had(run: RunFolder, origin: Origin, wanted: tuple[str, int, int]) -> None:
    origin.publish(VERSION, WEIGHTS)
    with Dealer(origin.server, WeightKeys.read(run)) as dealer:
        dealer.control.send(encode(ChunkWanted(VERSION, 5, *wanted)))
        answer = dealer.ask(ManifestWanted(VERSION))
        if "/" in wanted[0]:
            assert answer == Content(ALL) and origin.server.counters.num_malformed == 1
        else:
            assert isinstance(answer, Unavailable) and answer.number == 5


def test_a_server_whose_thread_fails_says_so_and_goes_on(run: RunFolder, origin: Origin, make_worker: Callable[..., Worker],
                                                         capsys: pytest.CaptureFixture) -> None:
    announcement = origin.publish(VERSION, WEIGHTS)

    def fail() -> None:
        raise OSError("nobody has thought of this")

    origin.server._do(fail)
    assert np.array_equal(read(make_worker("node").fetch(announcement)), WEIGHTS)
    assert origin.server.counters.num_failures == 1 and "nobody has thought of this" in capsys.readouterr().out


CURVE = WeightsConfig(chunk_mb=1, timeout_s=60.0, security=Security.curve)


@pytest.fixture
def secret_origin(run: RunFolder, tmp_path: Path) -> Iterator[Origin]:
    origin = Origin(run, tmp_path / "trainer", CURVE)
    yield origin
    origin.close()


def test_with_curve_all_of_it_is_encrypted(secret_origin: Origin, make_worker: Callable[..., Worker], pool: ThreadPoolExecutor) -> None:
    announcement, parent, child = secret_origin.publish(VERSION, WEIGHTS), make_worker("parent", CURVE), make_worker("child", CURVE)
    parent.server.expect(VERSION)
    fetches = [pool.submit(child.fetch, announcement, [parent.endpoint]), pool.submit(parent.fetch, announcement)]
    for fetched in fetches:
        assert np.array_equal(read(fetched.result(WAIT_S)), WEIGHTS)
    assert secret_origin.server.counters.chunks_sent == NUM_CHUNKS


@pytest.mark.parametrize("security", Security)
def test_another_key_gets_nothing(run: RunFolder, security: Security, tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    origin, worker = Origin(run, tmp_path / "trainer", WeightsConfig(chunk_mb=1, security=security)), make_worker("node")
    announcement, strange = origin.publish(VERSION, WEIGHTS), strangers_keys(tmp_path)
    worker.keys = WeightKeys(worker.keys.server, strange.client)  # knows the server's key, but is not let in
    with pytest.raises(WeightsError, match="refused our key"):
        worker.fetch(announcement)
    deadline = time.monotonic() + WAIT_S
    while origin.server.counters.num_refused == 0:
        assert time.monotonic() < deadline
    worker.keys, worker.config = strange, WeightsConfig(chunk_mb=1, timeout_s=2.0)
    with pytest.raises(WeightsError, match=r"cannot be fetched: no source has its manifest"):
        worker.fetch(announcement)
    assert origin.server.counters.bytes_sent == origin.server.counters.num_fetchers == 0
    origin.close()


# -- full memory -----------------------------------------------------------------------------------------------------------

def test_a_node_without_room_says_so(origin: Origin, tmp_path: Path, make_worker: Callable[..., Worker]) -> None:
    with small_disk(tmp_path / "disk", "100k"):
        announcement, worker = origin.publish(VERSION, WEIGHTS), make_worker("disk/node")
        with pytest.raises(WeightsError, match=r"No space left on device.*Free some memory.*weights\.dir"):
            worker.fetch(announcement)
        assert origin.server.counters.chunks_sent == 0
        worker.close()


# -- differences -----------------------------------------------------------------------------------------------------------

DELTA = WeightsConfig(chunk_mb=1, timeout_s=60.0, delta=True)


def of_chunks(counters: ServerCounters) -> tuple[int, int, int]:
    """What the door does not count, which hears of a connection a little later."""
    return counters.bytes_sent, counters.chunks_sent, counters.num_fetchers


def test_a_hundred_versions_one_after_the_other_are_exact(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    """By differences alone, through a relay that hands them on."""
    relay, leaf = make_worker("relay", DELTA), make_worker("leaf", DELTA)
    weights, base = make_weights(3, 20_000), None
    for number in range(101):
        version = Version(1, number)
        announcement = origin.publish(version, weights, base)
        relay.fetch(announcement)
        sent = of_chunks(origin.server.counters)
        assert np.array_equal(read(leaf.fetch(announcement, [relay.endpoint])), weights)
        assert leaf.progress.num_deltas == relay.progress.num_deltas == (0 if base is None else 10)
        assert of_chunks(origin.server.counters) == sent, "the leaf's came from the relay"
        for node in (relay, leaf):
            node.store.remove_older({version} if base is None else {version, base})
            if number:
                node.server.withdraw(Version(1, number - 1))
        weights, base = step(weights, number), version
    assert relay.progress.received < 0.4 * relay.progress.size
    assert len(relay.store.versions()) == 2


def test_what_is_removed_is_closed_at_once(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    """Its memory is free then, and not when Python happens to look for what leads back to itself."""
    worker, weights, base = make_worker("closing", DELTA), make_weights(3, 20_000), None
    gc.disable()
    try:
        for number in range(4):
            version = Version(1, number)
            worker.fetch(origin.publish(version, weights, base))
            worker.store.remove_older({version})
            if base is not None:
                worker.server.withdraw(base)
            weights, base = step(weights, number), version
        deadline = time.monotonic() + WAIT_S
        while left := [path for path in open_files() if "/closing/" in path and path.endswith("(deleted)")]:
            assert time.monotonic() < deadline, left
            time.sleep(0.01)
    finally:
        gc.enable()


def open_files() -> list[str]:
    found = []
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(entry.path))
    return found


def test_who_has_not_the_base_gets_everything(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    worker, late = make_worker("worker", DELTA), make_worker("late", DELTA)
    worker.fetch(origin.publish(Version(1, 0), WEIGHTS))
    second, third = step(WEIGHTS, 1), step(step(WEIGHTS, 1), 2)
    origin.publish(VERSION, second, Version(1, 0))
    announcement = origin.publish(NEXT, third, VERSION)
    assert np.array_equal(read(worker.fetch(announcement)), third), "it holds 1.0, the differences are to 1.1"
    assert (worker.progress.num_deltas, worker.progress.num_corrupt) == (0, 0)
    assert np.array_equal(read(late.fetch(announcement)), third) and late.progress.num_deltas == 0


def test_the_base_is_an_older_version(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    """Another worker of the node may have fetched a newer one."""
    worker, oldest = make_worker("worker", DELTA), Version(1, 0)
    worker.fetch(origin.publish(oldest, WEIGHTS))
    announcement = origin.publish(VERSION, step(WEIGHTS, 1), oldest)
    worker.fetch(origin.publish(NEXT, step(step(WEIGHTS, 1), 2), VERSION))
    assert np.array_equal(read(worker.fetch(announcement)), step(WEIGHTS, 1)) and worker.progress.num_deltas == NUM_CHUNKS


def test_a_relay_without_differences_hands_on_whole_chunks(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    relay, leaf = make_worker("relay", DELTA), make_worker("leaf", DELTA)
    leaf.fetch(origin.publish(VERSION, WEIGHTS))
    announcement = origin.publish(NEXT, step(WEIGHTS, 1), VERSION)
    relay.fetch(announcement)
    assert np.array_equal(read(leaf.fetch(announcement, [relay.endpoint])), step(WEIGHTS, 1)) and leaf.progress.num_deltas == 0


def test_after_a_wrong_difference_whole_chunks_are_asked_for(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    worker, relay = make_worker("worker", DELTA), make_worker("relay", DELTA)
    announcement = origin.publish(VERSION, WEIGHTS)
    worker.fetch(announcement)
    relay.fetch(announcement)
    announcement = origin.publish(NEXT, step(WEIGHTS, 1), VERSION)
    relay.fetch(announcement)
    deltas = relay.store.delta(relay.store.held(NEXT))
    content = bytearray(deltas.read_bytes())
    content[200] ^= 1  # in the first difference
    deltas.write_bytes(content)
    assert np.array_equal(read(worker.fetch(announcement, [relay.endpoint])), step(WEIGHTS, 1))
    assert worker.progress.num_corrupt == 1 and worker.progress.failures == [] and worker.progress.num_deltas < NUM_CHUNKS


def test_a_wrong_base_is_made_good_by_whole_chunks(origin: Origin, make_worker: Callable[..., Worker]) -> None:
    """The only source is asked again: its differences are right, but for a base that is not ours."""
    worker = make_worker("worker", DELTA)
    spoil(worker.fetch(origin.publish(VERSION, WEIGHTS)), *range(10))
    announcement = origin.publish(NEXT, step(WEIGHTS, 1), VERSION)
    assert np.array_equal(read(worker.fetch(announcement)), step(WEIGHTS, 1))
    assert worker.progress.num_corrupt > 0 and worker.progress.failures == []


# -- the server itself -----------------------------------------------------------------------------------------------------

def test_a_server_that_closes_leaves_nothing(run: RunFolder, origin: Origin) -> None:
    threads = threading.active_count()
    server = WeightServer(LOOPBACK, CURVE, WeightKeys.read(run))
    port = int(server.endpoint.rsplit(":", 1)[1])
    server.expect(VERSION)
    server.close()
    server.close()
    assert threading.active_count() == threads
    again = WeightServer(TransportConfig(port_range=f"{port}-{port}"), CURVE, WeightKeys.read(run))
    assert again.endpoint == server.endpoint
    again.close()


def test_who_waits_is_told_when_the_server_closes(origin: Origin, make_worker: Callable[..., Worker], pool: ThreadPoolExecutor) -> None:
    announcement, parent, child, arrived = origin.publish(VERSION, WEIGHTS), make_worker("parent"), make_worker("child"), Arrived()
    Half(parent, origin, announcement, 20)
    fetched = pool.submit(child.fetch, announcement, [parent.endpoint], arrived)
    arrived.at_least(20 * CHUNK)
    parent.server.close()
    assert np.array_equal(read(fetched.result(WAIT_S)), WEIGHTS) and child.progress.failures == [f"{parent.endpoint}: the connection broke"]


def test_what_cannot_be_read_is_not_offered(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="version 1.1 cannot be served"):
        origin.server.offer(VERSION, tmp_path / "nothing")
    folder = origin.write(VERSION, WEIGHTS)
    with pytest.raises(WeightsError, match="not a delta file"):
        origin.server.offer(VERSION, folder, b"", folder / NAMES[0])

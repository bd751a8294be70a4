"""Who attacks: each sends until it is told to stop, and counts what it has sent.

    stranger       TCP to every port of the run: nothing, noise, greetings, handshakes, HTTP, endless frames
    key_holder     knows the run's keys: changed messages to coordinator, weight servers (also by ticket) and reward elements
    bad_worker     registered: takes leases, and brings back changed groups, old ones, those of others, of other epochs
    http_client    changed requests to engines, with their key and without
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

import msgspec
import zmq

from tests.fuzz.mutations import mutate_bytes, mutate_message, mutate_value
from tests.support.groups import make_group, make_partial
from workers.messages.codec import MAX_FRAME, MAX_PIECE, MessageError, from_coordinator, pack
from workers.messages.from_coordinator import HeartbeatReply, Leases, Refused, Welcome
from workers.messages.from_worker import (
    BatchRequest,
    CheckpointRequest,
    Draining,
    Goodbye,
    GroupFailed,
    GroupFinished,
    GroupParked,
    GroupRejected,
    Heartbeat,
    LoadRequest,
    Register,
    SourcesRequest,
    StepFinished,
    WorkerFailed,
)
from workers.messages.judging import OutputWanted, ScoreWanted
from workers.messages.parts import Announcement, HeldLease, Lease, Message, Purpose, Role, Version, WorkerStatus
from workers.run.folder import RunFolder
from workers.transport.keys import read_keys
from workers.transport.rendezvous import newest
from workers.transport.weights.messages import ChunkWanted, ManifestWanted, Ticket, TicketWanted, encode, from_server

SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
PATIENCE_S = 5.0
GLANCE_S = 0.3
"""For a port that may answer nobody, as gloo's do."""
A_CONNECTION = 200
"""Messages, before another connection is made."""
CORPUS: tuple[Message, ...] = (
    Register(Role.rollout, "node", 1), Register(Role.trainer, "node", 1), Register(Role.reward, "node", 1, serves="tcp://127.0.0.1:1"),
    Heartbeat(held=Version(1, 3), status=WorkerStatus(num_running=3), capacity=4, leases=[HeldLease("g1", 0, Purpose.training, Version(1, 0))]),
    Draining("time limit"), GroupFinished(make_group()), GroupParked(make_partial("g1", 0)), GroupRejected("g1", 0, 3, 0, 0.5),
    GroupFailed("g1", 0, "cause"), GroupFailed("g2", 0, "cause", fatal=True, hopeless=True), BatchRequest(3), BatchRequest(3, 1, 2),
    StepFinished(Announcement(Version(1, 4), "", "digest", ["tcp://127.0.0.1:1"]), {"loss": 1.0}), CheckpointRequest(3, "/tmp/x"),
    SourcesRequest(Version(1, 3), ["tcp://127.0.0.1:1"]), LoadRequest(Version(1, 3)), WorkerFailed("cause"), Goodbye("reason"))


class Attack:
    """One attacker, in a thread. `ports`: all that listen; `http_ports`: of HTTP servers, with their keys; `counts`: what it has sent."""

    def __init__(self, run: RunFolder, seed: str, stop: threading.Event, ports: Callable[[], list[int]],
                 http_ports: Callable[[], dict[int, str]]) -> None:
        self.run, self.random, self.stop, self.ports, self.http_ports = run, Random(seed), stop, ports, http_ports
        self.counts: Counter[str] = Counter()
        self.context = zmq.Context()

    def live(self, attack: Callable[[], None]) -> None:
        """Attack until told to stop."""
        while not self.stop.is_set():
            try:
                attack()
            except (OSError, zmq.ZMQError, http.client.HTTPException):  # turned away
                self.counts["turned away"] += 1
        self.context.destroy(linger=0)

    # -- without a key ---------------------------------------------------------------------------------------------------

    def stranger(self) -> None:
        """One connection."""
        if not (ports := self.ports()):
            return
        random = self.random
        with socket.create_connection(("127.0.0.1", random.choice(ports)), GLANCE_S) as connection:
            connection.settimeout(PATIENCE_S)
            for content in self._noise():
                connection.sendall(content)
                self.counts["frames"] += 1
            if random.random() < 0.05:
                connection.settimeout(0.2)
                connection.recv(1000)

    def _noise(self) -> Iterator[bytes]:
        random = self.random
        hello = GREETING + b"\x04\xc8\x05HELLO\x01\x00" + bytes(random.randbytes(192))
        request = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n{}}}}"
        yield from random.choice((
            [], [random.randbytes(random.randrange(1, 300))], [SIGNATURE], [GREETING], [hello], [mutate_bytes(random, hello)],
            [GREETING, b"\x06" + (200 << 20).to_bytes(8, "big"), *[bytes(1 << 16)] * 20], [mutate_bytes(random, request)],
            [b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 2000], [request[:30]],
            [GREETING.replace(b"CURVE", b"PLAIN"), b"\x04\x0e\x05HELLO\x03abc\x03abc"], [GREETING.replace(b"CURVE", b"NULL\0")]))

    # -- with the keys ---------------------------------------------------------------------------------------------------

    def dealer(self, endpoint: str) -> zmq.Socket:
        """A connection with the run's keys."""
        server, client = read_keys(self.run, "server"), read_keys(self.run, "client")
        dealer = self.context.socket(zmq.DEALER)
        dealer.linger, dealer.sndtimeo, dealer.rcvtimeo, dealer.reconnect_ivl = 0, int(PATIENCE_S * 1000), int(PATIENCE_S * 1000), 500
        dealer.maxmsgsize = (8 << 20) + MAX_FRAME
        dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = server.public, client.public, client.secret
        dealer.connect(endpoint)
        return dealer

    def send(self, dealer: zmq.Socket, content: bytes) -> None:
        """Send in pieces, now and then not as they should be."""
        size = MAX_PIECE if self.random.random() < 0.95 else self.random.choice((1, 100, MAX_FRAME + 1000))
        pieces = [content[start: start + size] for start in range(0, min(len(content), 200 * size), size)] or [b""]
        dealer.send_multipart(pieces)
        self.counts["frames"] += 1

    def key_holder(self) -> None:
        """One connection to the coordinator, which it never registers with in earnest."""
        address = newest(self.run)
        assert address is not None
        with self.dealer(address.router) as dealer:
            for _ in range(A_CONNECTION):
                message = self.random.choice(CORPUS)
                if not isinstance(message, Register) and self.random.random() < 0.1:
                    self.send(dealer, pack(message))
                self.send(dealer, mutate_message(self.random, pack(message)))
                with contextlib.suppress(zmq.Again):
                    dealer.recv_multipart(zmq.DONTWAIT)
                if self.stop.is_set():
                    break
            self.until_heard(dealer)

    def until_heard(self, dealer: zmq.Socket) -> None:
        """Wait until the coordinator has taken all that was sent: what leaves without that stands in its memory, and this is no flood."""
        mark = self.random.randrange(10**6, 10**9)
        dealer.send_multipart([pack(Register(Role.rollout, "fuzz", 1, protocol=mark))])
        while str(mark).encode() not in b"".join(dealer.recv_multipart()):
            pass

    def endpoints(self) -> list[str]:
        """Where the run's encrypted sockets listen."""
        return [f"tcp://127.0.0.1:{port}" for port in self.ports() if port not in self.http_ports()]

    def weight_thief(self) -> None:
        """One connection to anything that may be a weight server or a reward element."""
        random, version = self.random, Version(1, self.random.randrange(50))
        asked = (TicketWanted(), ManifestWanted(version), ChunkWanted(version, 1, "model-00000.safetensors", 0, 4096),
                 ScoreWanted(1, "prompt", "completion", "4", "numeric_distance"), OutputWanted(2, "print(1)"))
        endpoint = random.choice(self.endpoints() or ["tcp://127.0.0.1:1"])
        with self.dealer(endpoint) as dealer:
            dealer.send(encode(TicketWanted()))
            dealer.rcvtimeo = 300
            with contextlib.suppress(zmq.Again, msgspec.MsgspecError, UnicodeDecodeError):
                answer = from_server.decode(dealer.recv_multipart()[0])
                if isinstance(answer, Ticket) and answer.port:
                    self._bulk(answer, asked)
            for _ in range(A_CONNECTION // 4):
                message = random.choice(asked)
                self.send(dealer, mutate_bytes(random, encode(message)) if random.random() < 0.5 else mutate_message(random, pack(message)))  # type: ignore[type-var]
                if self.stop.is_set():
                    return

    def _bulk(self, ticket: Ticket, asked: tuple) -> None:
        with self.context.socket(zmq.DEALER) as bulk:
            bulk.linger, bulk.sndtimeo, bulk.reconnect_ivl = 0, 300, -1
            bulk.plain_username, bulk.plain_password = ticket.name.encode(), ticket.secret.encode()
            bulk.connect(f"tcp://127.0.0.1:{ticket.port}")
            for _ in range(A_CONNECTION // 4):
                self.send(bulk, mutate_bytes(self.random, encode(self.random.choice(asked[:3]))))

    # -- registered ------------------------------------------------------------------------------------------------------

    def bad_worker(self) -> None:
        """Register, and bring back what nobody should take, for a while."""
        address = newest(self.run)
        assert address is not None
        decoder, held = from_coordinator(256 << 20), list[Lease]()
        version = Version(1, 0)
        with self.dealer(address.router) as dealer:
            self.send(dealer, pack(Register(Role.rollout, "fuzz", 1, serves="tcp://127.0.0.1:9")))
            for number in range(A_CONNECTION):
                if self.stop.is_set():
                    break
                with contextlib.suppress(zmq.Again, MessageError):
                    match decoder.decode(dealer.recv_multipart(zmq.DONTWAIT)):
                        case Leases() as message:
                            held += message.leases
                        case Welcome() | HeartbeatReply() as message:
                            version = message.announcement.version if message.announcement else version
                        case Refused():
                            self.counts["refused"] += 1
                if number % 10 == 0:
                    leases = [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in held]
                    self.send(dealer, pack(Heartbeat(held=version, capacity=8, leases=leases)))
                self.send(dealer, self._result(held, version))
            self.until_heard(dealer)
            self.send(dealer, pack(Goodbye("enough")))

    def _result(self, held: list[Lease], version: Version) -> bytes:
        """A group of a lease, or of none, with something wrong."""
        random = self.random
        group_id, attempt = f"g{random.randrange(2000)}", random.choice((0, 1000, 1001, 2**40))
        if held and random.random() < 0.7:
            lease = random.choice(held)
            group_id, attempt = lease.group_id, lease.attempt
        if group_id.startswith("e"):
            results = [GroupFinished(make_group(group_id, attempt, purpose=Purpose.evaluation))]
        else:
            results = [GroupFinished(make_group(group_id, attempt)), GroupParked(make_partial(group_id, attempt)),
                       GroupRejected(group_id, attempt, 3, 0, 0.5)]
        message = random.choice((*results, SourcesRequest(version), LoadRequest(version)))
        return mutate_message(random, pack(message))

    # -- HTTP ------------------------------------------------------------------------------------------------------------

    def http_client(self) -> None:
        """A few requests over one connection."""
        random = self.random
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2, "temperature": 1.0}, "return_logprob": True}
        chat = {"model": "x", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        paths = ("/generate", "/generate", "/generate", "/v1/chat/completions", "/health", "/nothing")
        if not (keys := self.http_ports()):
            self.stop.wait(0.2)
            return
        port = random.choice(sorted(keys))
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        with contextlib.closing(connection):
            for _ in range(20):
                content = json.dumps(mutate_value(random, random.choice((body, chat))), default=str).encode()
                if random.random() < 0.3:
                    content = mutate_bytes(random, content)
                key = keys[port] if random.random() < 0.8 else "0" * 64
                connection.request("POST", random.choice(paths), content, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
                answer = connection.getresponse()
                answer.read()
                self.counts["frames"] += 1
                self.counts[f"HTTP {answer.status}"] += 1
                if self.stop.is_set():
                    return

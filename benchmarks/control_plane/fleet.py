"""Many played rollout workers and a trainer in one process, with a socket each: everything but models, over CURVE.

    lease --answer_s later--> GroupFinished --> Acknowledged          a heartbeat every second, or as the coordinator says
    Batch --> the next version, and the next BatchRequest

One thread and one ZeroMQ context for all of them; results are sent once and counted, so that what is not accepted is seen. Large batches are
not looked into: a trainer would do that elsewhere.
"""

from __future__ import annotations

import heapq
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import zmq

from benchmarks.control_plane.figures import EPOCH, Load, Seen, figures
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.codec import LARGE_FRAME, LARGE_PIECE, encode, from_coordinator
from workers.messages.from_coordinator import Acknowledged, Batch, HeartbeatReply, Leases, VersionAnnounced, Welcome
from workers.messages.from_worker import BatchRequest, GroupFinished, Heartbeat, Register, StepFinished
from workers.messages.parts import Announcement, Group, HeldLease, Lease, Message, Purpose, Role, Version
from workers.run.folder import RunFolder
from workers.transport.door import raise_limit
from workers.transport.keys import read_keys
from workers.transport.rendezvous import newest

ANSWERS, LIMIT_S = 8, 120.0


@dataclass
class Rollout:
    """One worker. `version`: that it holds."""

    socket: zmq.Socket
    leases: dict[str, Lease] = field(default_factory=dict)
    sent: dict[tuple[str, int], float] = field(default_factory=dict)
    freed: list[float] = field(default_factory=list)
    beat_at: float | None = None
    leases_sent: int = 0
    interval_s: float = 1.0


class Fleet:
    """All of them. `draw`: of the times at which they answer; `over`: may be set from another thread, to end."""

    def __init__(self, run: RunFolder, load: Load) -> None:
        self.load, self.seen, self.draw, self.over = load, Seen(), np.random.default_rng(0), threading.Event()
        self._context, self._poller, self._decoder = zmq.Context(2), zmq.Poller(), from_coordinator(1 << 30)
        self._context.max_sockets = load.workers + 16
        self._keys = read_keys(run, "server").public, read_keys(run, "client")
        raise_limit()
        address = newest(run)
        assert address is not None, "the coordinator has been started"
        self._address, self._subscriber = address, self._socket(zmq.SUB, address.publisher)
        self._subscriber.subscribe(b"")
        self.rollouts = {socket: Rollout(socket) for socket in (self._socket(zmq.DEALER, address.router) for _ in range(load.workers))}
        self._trainer, *self._leaders = (self._socket(zmq.DEALER, address.router) for _ in range(load.shares))
        self._shares_left, self._step, self._finishes = load.shares, 0, True
        self._answers = [self._answer() for _ in range(ANSWERS)]
        self._version: Version | None = None
        self._due: list[tuple[float, int, Rollout | None, Lease | None]] = []
        self._order = itertools.count()

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.linger = socket.sndhwm = socket.rcvhwm = 0
        socket.maxmsgsize = LARGE_FRAME
        socket.curve_serverkey, (socket.curve_publickey, socket.curve_secretkey) = self._keys[0], (self._keys[1].public, self._keys[1].secret)
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        return socket

    def _answer(self) -> Group:
        total = self.load.samples * self.load.tokens
        rewards = Float32.of(self.draw.integers(0, 2, self.load.samples).astype(np.float32))
        return Group(
            group_id="g0", attempt=0, purpose=Purpose.training, prompt_id="p", prompt=Int32.of(np.arange(100)),
            lengths=Int32.of([self.load.tokens] * self.load.samples), tokens=Int32.of(self.draw.integers(0, 150_000, total).astype(np.int32)),
            logprobs=Float32.of(-self.draw.random(total, np.float32)), loss_mask=Bool.of(np.ones(total, bool)), rewards=rewards, scores=rewards,
            epochs=Int32.of([EPOCH]), steps=Int32.of([0]), run_lengths=Int32.of([total]))

    def play(self, seconds: float) -> None:
        """For so long after the first lease; then nothing more is finished, and answers are waited for."""
        self._send(self._trainer, Register(Role.trainer, "train0", 1))
        for number, leader in enumerate(self._leaders):
            self._send(leader, Register(Role.trainer_shard, f"train{number + 1}", 1))
        for number, rollout in enumerate(self.rollouts.values()):
            self._send(rollout.socket, Register(Role.rollout, f"node{number // 8}", number + 1))
            self._at(self.draw.uniform(0, 1), rollout, None)
        self._at(0.5, None, None)
        self._publish(0)
        self._turns(LIMIT_S, lambda: self.over.is_set() or any(rollout.leases for rollout in self.rollouts.values()))
        self._turns(seconds, self.over.is_set)
        self._finishes = False
        self._turns(LIMIT_S, lambda: not any(rollout.sent for rollout in self.rollouts.values()))
        self.seen.num_refused += sum(len(rollout.sent) for rollout in self.rollouts.values())

    def _turns(self, seconds: float, over: Callable[[], bool]) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not over():
            self._turn()

    def _at(self, delay_s: float, rollout: Rollout | None, lease: Lease | None) -> None:
        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._order), rollout, lease))

    def _turn(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, rollout, lease = heapq.heappop(self._due)
            if lease is None:
                self._beat(rollout)
            elif rollout is not None and self._finishes:
                self._finish(rollout, lease)
        wait_ms = max(0.0, min(0.05, self._due[0][0] - time.monotonic() if self._due else 0.05)) * 1000
        for socket, _ in self._poller.poll(int(wait_ms) + 1):
            try:
                for _ in range(16):
                    frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
                    if sum(map(len, frames)) > LARGE_PIECE:
                        self._share_came()
                    else:
                        self._take(socket, self._decoder.decode([frame.bytes for frame in frames]))
            except zmq.Again:
                pass

    def _share_came(self) -> None:
        self._shares_left -= 1
        if not self._shares_left:
            self.seen.num_steps += 1
            self._publish(self._step + 1)

    def _take(self, socket: zmq.Socket, message: Message) -> None:
        rollout = self.rollouts.get(socket)
        match message:
            case VersionAnnounced():
                self._version = message.announcement.version
            case Batch():
                self._share_came()
            case Welcome() if rollout is not None:
                self._beat(rollout, again=False)
            case HeartbeatReply() if rollout is not None:
                if rollout.beat_at is not None:
                    self.seen.heartbeat_s.append(time.monotonic() - rollout.beat_at)
                    rollout.beat_at = None
                rollout.leases_sent, rollout.interval_s = message.leases_sent, max(1.0, message.interval_s)
                if message.announcement is not None:
                    self._version = message.announcement.version
            case Leases() if rollout is not None:
                for lease in message.leases:
                    rollout.leases[lease.group_id] = lease
                    first = not rollout.freed
                    if not first:
                        self.seen.leased_s.append(time.monotonic() - rollout.freed.pop(0))
                    self._at(self.load.answer_s * (self.draw.uniform(0.0, 1.0) if first else self.draw.uniform(0.5, 1.5)), rollout, lease)
            case Acknowledged() if rollout is not None and (sent := rollout.sent.pop((message.group_id, message.attempt), None)) is not None:
                self.seen.acknowledged_s.append(time.monotonic() - sent)
                self.seen.num_refused += not message.accepted
                del rollout.leases[message.group_id]

    def _finish(self, rollout: Rollout, lease: Lease) -> None:
        group = msgspec.structs.replace(self._answers[lease.attempt % ANSWERS], group_id=lease.group_id, attempt=lease.attempt,
                                        prompt_id=lease.prompt_id, steps=Int32.of([lease.version.step]))
        rollout.sent[lease.group_id, lease.attempt] = time.monotonic()
        rollout.freed.append(time.monotonic())
        self.seen.num_bytes += self._send(rollout.socket, GroupFinished(group))

    def _beat(self, rollout: Rollout | None, again: bool = True) -> None:
        if rollout is None:
            for socket in (self._trainer, *self._leaders):
                self._send(socket, Heartbeat())
        else:
            held = [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in rollout.leases.values()]
            rollout.beat_at = time.monotonic()
            capacity, tokens = self.load.leases_each * self.load.samples, self.load.tokens * self.load.samples * len(held)
            self._send(rollout.socket, Heartbeat(held=self._version, capacity=capacity, leases=held, leases_seen=rollout.leases_sent,
                                                 tokens_in_flight=tokens))
        if again:
            self._at(rollout.interval_s if rollout is not None else 1.0, rollout, None)

    def _publish(self, step: int) -> None:
        self._send(self._trainer, StepFinished(Announcement(Version(EPOCH, step), "/weights", "digest"), {"loss": 0.5}))
        self._shares_left, self._step = self.load.shares, step
        for share, socket in enumerate((self._trainer, *self._leaders)):
            self._send(socket, BatchRequest(step, share, self.load.shares))

    def _send(self, socket: zmq.Socket, message: Message) -> int:
        pieces = encode(message)
        socket.send_multipart(pieces, copy=False)
        return sum(map(len, pieces))

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)


def main(path: str, load: str, seconds: str) -> None:
    """The fleet as a process; its figures are its last line."""
    asked = msgspec.json.decode(load, type=Load)
    fleet = Fleet(RunFolder(Path(path)), asked)
    fleet.play(float(seconds))
    fleet.close()
    print(json.dumps(figures(fleet.seen, float(seconds))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

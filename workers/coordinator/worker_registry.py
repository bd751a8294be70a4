"""Which workers there are, what they hold and when they were last heard. A pure state machine; time is an argument.

A worker is lost when it has been silent for `heartbeat_timeout_s`, or when its connection broke and it did not come
back within `reconnect_grace_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.coordinator.departed import Departed
from workers.coordinator.registered_worker import SUSPECT_AFTER, Worker
from workers.messages.from_worker import Heartbeat, Register
from workers.messages.parts import Role, Version, WorkerStatus

TRIED_AGAIN_S = 300.0
"""So long after its last failure a worker gets leases as the others do. One that was suspect is so again by one more failure."""
HEARTBEATS_PER_S = 500
"""Of all workers together; as long as that leaves each enough of them before it counts as lost."""
LONGEST_FETCH = 8
"""Steps for which a version that is being fetched is kept."""


@dataclass
class Registry:
    """All workers of a run. `holding`: how many rollout workers that are not about to leave hold each version (None: no weights yet); `changed`: the
    rollout workers of whom something has, since someone took them out of it; `failing`: when groups failed last at whom
    they do; `suspects`: who of them is suspect, and stays."""

    heartbeat_s: float
    heartbeat_timeout_s: float
    reconnect_grace_s: float
    workers: dict[bytes, Worker] = field(default_factory=dict)
    num_registered: dict[Role, int] = field(default_factory=lambda: dict.fromkeys(Role, 0))
    holding: dict[Version | None, int] = field(default_factory=dict)
    changed: dict[bytes, None] = field(default_factory=dict)
    failing: dict[bytes, float] = field(default_factory=dict)
    suspects: dict[bytes, None] = field(default_factory=dict)
    _departed: Departed = field(default_factory=Departed)
    _by_role: dict[Role, dict[bytes, Worker]] = field(default_factory=lambda: {role: {} for role in Role})
    _reward_endpoints: list[str] = field(default_factory=list)
    _turns: list[bytes] = field(default_factory=list)

    def register(self, peer: bytes, message: Register, now: float) -> Worker:
        """Take in a worker, or the same one again after a reconnection."""
        known = self.workers.get(peer)
        if known is not None:
            self.heard(peer, now)
            return known
        worker = Worker(peer, message.role, self.num_registered[message.role], message.host, message.pid, now, job=message.job,
                        serves=message.serves, status=self._departed.back(peer))
        self.num_registered[message.role] += 1
        self.workers[peer] = self._by_role[message.role][peer] = worker
        self._count(worker, 1)
        self._list_rewards(worker)
        return worker

    def heard(self, peer: bytes, now: float) -> Worker | None:
        """Note a sign of life; returns the worker, None if it is unknown."""
        worker = self.workers.get(peer)
        if worker is not None:
            worker.last_heard, worker.unreachable_since = now, None
        return worker

    def beat(self, worker: Worker, message: Heartbeat) -> None:
        """Take note of what a worker says of itself."""
        self._count(worker, -1)
        worker.beat(message)
        self._count(worker, 1)

    def drain(self, worker: Worker, reason: str) -> None:
        """Note that a worker is about to leave."""
        self._count(worker, -1)
        self._fewer(worker.peer)
        worker.draining, worker.capacity = reason, 0
        self._count(worker, 1)
        self._list_rewards(worker)

    def remove(self, peer: bytes) -> None:
        """Forget a worker."""
        worker = self.workers.pop(peer, None)
        if worker is not None:
            self._count(worker, -1)
            self._fewer(peer)
            del self._by_role[worker.role][peer]
            if worker.role in (Role.rollout, Role.reward):
                self._departed.left(peer, worker.status)
            self._list_rewards(worker)

    def _fewer(self, peer: bytes) -> None:  # who is suspect may be needed again
        self.suspects.pop(peer, None)
        self.failing.pop(peer, None)
        self.changed.update(self.suspects)

    def failed(self, worker: Worker, why: str, now: float) -> str:
        """Note that a group failed at a worker, or that its result was refused; returns what is to be said, '' for nothing new."""
        self.changed[worker.peer] = None
        worker.failed_in_a_row += 1
        number = worker.failed_in_a_row
        if not worker.draining:
            self.failing[worker.peer] = now
        if not worker.suspect:
            return ""
        if not worker.draining:
            self.suspects[worker.peer] = None
        return "" if number & (number - 1) else (
            f"{worker.name} (process {worker.pid} on {worker.host}): {number} of its groups in a row have failed or were refused, the last because: "
            f"{why[:1000]}. Others get its leases as long as there are others; it is tried again after {TRIED_AGAIN_S / 60:g} minutes")

    def worked(self, worker: Worker) -> None:
        """Note that a result of a worker was taken."""
        worker.failed_in_a_row = 0
        self.failing.pop(worker.peer, None)
        self.suspects.pop(worker.peer, None)

    def try_again(self, now: float) -> None:
        """Let those have leases again at whom nothing has failed for long."""
        for peer in [peer for peer, last in self.failing.items() if now - last > TRIED_AGAIN_S]:
            del self.failing[peer]
            self.suspects.pop(peer, None)
            self.workers[peer].failed_in_a_row = SUSPECT_AFTER - 1 if self.workers[peer].suspect else 0
            self.changed[peer] = None

    def has_others(self, worker: Worker) -> bool:
        """Whether another rollout worker is there that is not suspect, and not about to leave; it may still load its weights."""
        return sum(self.holding.values()) - len(self.suspects) > (not worker.draining and not worker.suspect)

    def _count(self, worker: Worker, change: int) -> None:
        if worker.role is not Role.rollout:
            return
        self.changed[worker.peer] = None
        if worker.draining:
            return
        self.holding[worker.held] = self.holding.get(worker.held, 0) + change
        if not self.holding[worker.held]:
            del self.holding[worker.held]

    def _list_rewards(self, changed: Worker) -> None:
        if changed.role is Role.reward:
            self._reward_endpoints = [worker.serves for worker in self._by_role[Role.reward].values() if not worker.draining]

    @property
    def interval_s(self) -> float:
        """How long a worker is to wait between two heartbeats."""
        return min(max(self.heartbeat_s, len(self.workers) / HEARTBEATS_PER_S), self.heartbeat_timeout_s / 4)

    def in_turn(self, count: int = 256) -> list[Worker]:
        """At most so many workers; all of them have their turn before one has another."""
        self._turns = self._turns or list(self.workers)
        taken, self._turns = self._turns[:count], self._turns[count:]
        return [self.workers[peer] for peer in taken if peer in self.workers]

    def unreachable(self, peer: bytes, now: float) -> None:
        """Note that a message could not be sent because the connection is gone."""
        worker = self.workers.get(peer)
        if worker is not None and worker.unreachable_since is None:
            worker.unreachable_since = now

    def excuse(self, pause_s: float, now: float) -> None:
        """Note that nobody could be heard for `pause_s` seconds until now, because this process did not run."""
        for worker in self.workers.values():
            worker.last_heard = min(now, worker.last_heard + pause_s)
            if worker.unreachable_since is not None:
                worker.unreachable_since = min(now, worker.unreachable_since + pause_s)

    def lost(self, now: float) -> list[tuple[Worker, str]]:
        """Workers that must be given up now, with why. They stay registered until `remove`."""
        found = []
        for worker in self.workers.values():
            if worker.unreachable_since is not None and now - worker.unreachable_since > self.reconnect_grace_s:
                found.append((worker, f"its connection broke and it did not come back in {self.reconnect_grace_s:g} s; the process has died"))
            elif now - worker.last_heard > self.heartbeat_timeout_s:
                found.append((worker, f"it has been silent for {now - worker.last_heard:.0f} s (transport.heartbeat_timeout_s)"))
        return found

    def of(self, role: Role) -> list[Worker]:
        """The workers of one role, by slot."""
        return list(self._by_role[role].values())

    def number(self, role: Role) -> int:
        """How many workers of one role there are."""
        return len(self._by_role[role])

    def totals(self) -> WorkerStatus:
        """What rollout workers and reward elements have counted, added up: those that have left included, but for what they had then."""
        return self._departed.totals(worker.status for role in (Role.rollout, Role.reward) for worker in self.of(role))

    def ready(self) -> list[Worker]:
        """The rollout workers that hold weights and are not about to leave."""
        return [worker for worker in self._by_role[Role.rollout].values() if worker.ready]

    @property
    def num_ready(self) -> int:
        """How many those are."""
        return sum(self.holding.values()) - self.holding.get(None, 0)

    def reward_endpoints(self) -> list[str]:
        """Where rollout workers can have completions judged: by reward elements that are not about to leave."""
        return self._reward_endpoints

    def needed(self, newest: Version) -> Version:
        """Published versions older than this are being fetched by nobody, or for longer than `LONGEST_FETCH` steps take."""
        oldest = Version(newest.epoch, max(0, newest.step - LONGEST_FETCH))
        return max(oldest, min([newest, *(worker.fetching for worker in self.workers.values() if worker.fetching is not None)]))

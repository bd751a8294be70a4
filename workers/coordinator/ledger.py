"""Who works on which group, and what became of it. A pure state machine: no sockets, no clock.

    waiting --lease--> running --finish--> finished --consume--> consumed
       ^                  |
       +---fail/lost------+--- max_attempts failures ---> set aside, with its last error

Invariants, kept here: a group is in exactly one state; only the newest attempt of a running group can finish it, so
nothing is counted or consumed twice; `admitted` (running + finished + consumed) is what staleness is reckoned by, so a
failed or lost group gives its place back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.coordinator.staleness import FinishedGroup
from workers.messages.types import Group


@dataclass
class Running:
    """A leased group: its prompt's index, the attempt, the worker, and the version it was admitted at."""

    index: int
    attempt: int
    worker: bytes
    admitted_at: int


@dataclass
class Finished:
    """A finished group waiting to be consumed."""

    group: Group
    admitted_at: int
    order: int


@dataclass
class Ledger:
    """All training groups of a run. Group k trains prompt k of the data set; its id is `g<k>`."""

    max_attempts: int
    next_index: int = 0
    num_consumed: int = 0
    num_finished: int = 0
    running: dict[str, Running] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    set_aside: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    _retry: deque[int] = field(default_factory=deque)

    @property
    def admitted(self) -> int:
        """Groups running, finished or consumed."""
        return len(self.running) + len(self.finished) + self.num_consumed

    def lease(self, worker: bytes, version: int) -> tuple[str, int, int]:
        """Lease the next group, failed ones first, to `worker` at `version`; returns (group id, prompt index, attempt)."""
        if self._retry:
            index = self._retry.popleft()
        else:
            index, self.next_index = self.next_index, self.next_index + 1
        attempt = self.attempts.get(index, 0)
        self.attempts[index] = attempt + 1
        group_id = f"g{index}"
        self.running[group_id] = Running(index, attempt, worker, version)
        return group_id, index, attempt

    def finish(self, group: Group) -> bool:
        """Take a finished group; false if it is not the running attempt (a duplicate, or too late)."""
        lease = self.running.get(group.group_id)
        if lease is None or lease.attempt != group.attempt:
            return False
        del self.running[group.group_id]
        self.finished[group.group_id] = Finished(group, lease.admitted_at, self.num_finished)
        self.num_finished += 1
        return True

    def fail(self, group_id: str, attempt: int, cause: str, fatal: bool = False) -> bool:
        """Note a failure of the running attempt; the group is tried again or set aside. False if it was not running."""
        lease = self.running.get(group_id)
        if lease is None or lease.attempt != attempt:
            return False
        del self.running[group_id]
        self.failures[lease.index] = self.failures.get(lease.index, 0) + 1
        if fatal or self.failures[lease.index] >= self.max_attempts:
            self.set_aside[lease.index] = cause
            self._forget(lease.index)
        else:
            self._retry.append(lease.index)
        return True

    def release(self, worker: bytes) -> int:
        """Give back all that a lost worker had leased (no fault of the groups); returns how many."""
        lost = [(group_id, lease) for group_id, lease in self.running.items() if lease.worker == worker]
        for group_id, lease in lost:
            del self.running[group_id]
            self._retry.append(lease.index)
        return len(lost)

    def waiting_to_be_consumed(self) -> list[FinishedGroup]:
        """The finished groups as the staleness policy sees them."""
        return [FinishedGroup(group_id, entry.admitted_at, entry.order) for group_id, entry in self.finished.items()]

    def running_versions(self) -> list[int]:
        """The version that each running group was admitted at."""
        return [lease.admitted_at for lease in self.running.values()]

    def consume(self, group_ids: Iterable[str]) -> list[Group]:
        """Take finished groups out for good; each is returned once and never again. Raises KeyError on any other."""
        groups = []
        for group_id in group_ids:
            groups.append(self.finished.pop(group_id).group)
            self.num_consumed += 1
            self._forget(int(group_id[1:]))
        return groups

    def _forget(self, index: int) -> None:
        # Bounded memory: nothing more can happen to this index.
        self.attempts.pop(index, None)
        self.failures.pop(index, None)

"""Who works on which group, and what became of it. A pure state machine: no sockets, no clock.

    waiting --lease--> running --finish--> finished --take--> in training --consume--> consumed
       ^  ^               |  ^                ^                   |
       |  |               |  |                +-return_to_buffer--+   (its step was given up)
       |  |               +--+---park--> parked (what was generated so far is kept) --lease--> running
       |  +--fail---------+
       +-----release------+          max_attempts failures ---> set aside, with its last error
                          +--reject--> forgotten (workflow.keep): the next prompt takes its place

Invariants, kept here: a group is in exactly one state; only the newest attempt of a running group can finish or park it, so
nothing is counted or consumed twice; `admitted` (running + parked + finished + in training + consumed) is what staleness is
reckoned by, so a rejected, failed or lost group gives its place back, while a parked one keeps it, with the version it was admitted at.
What is in training counts as consumed only when its step is finished: a checkpoint before that holds it as finished.

Attempts are numbered through all incarnations of a run (`first_attempt`), so a result always names one lease only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.coordinator.groups.group_states import Finished, Leased, Parked, Running, index_of
from workers.coordinator.groups.group_tables import GroupTable, LeaseTable
from workers.coordinator.groups.staleness import FinishedGroup
from workers.messages.parts import Group, HeldLease, Partial

LOST_AFTER_S = 10.0
"""A running lease that its worker leaves out of all heartbeats for so long has been lost on its way."""
ATTEMPTS_PER_EPOCH = 1000
"""More often than that no group is leased in one incarnation."""
LOOKED_AT = 64
"""So many prompts that wait are looked at for one that has not failed at the same worker."""
MAX_CAUSE = 200
"""[characters] of why a group was set aside that are kept, in every checkpoint to come."""
MAX_SKIPPED = 1_000_000
"""So many prompts that wait to be sampled may lie before one that is adopted: more were never leased since a checkpoint."""


@dataclass
class Ledger:
    """All training groups of a run. Group k trains prompt k of the data set; its id is `g<k>`. `retry`: the prompts that wait to be sampled again, in
    order, each with the worker at which it has failed last (b'': at none)."""

    max_attempts: int
    first_attempt: int = 0
    next_index: int = 0
    num_consumed: int = 0
    num_finished: int = 0
    num_rejected: int = 0
    running: LeaseTable = field(default_factory=LeaseTable)
    parked: GroupTable[Parked] = field(default_factory=GroupTable)
    finished: GroupTable[Finished] = field(default_factory=GroupTable)
    in_training: dict[str, Finished] = field(default_factory=dict)
    failures: dict[int, int] = field(default_factory=dict)
    set_aside: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    retry: dict[int, bytes] = field(default_factory=dict)

    @property
    def admitted(self) -> int:
        """Groups running, parked, finished, in training or consumed."""
        return len(self.running) + len(self.parked) + len(self.finished) + self.num_taken

    @property
    def num_taken(self) -> int:
        """Groups that have their batch: in training or consumed."""
        return len(self.in_training) + self.num_consumed

    def lease(self, worker: bytes, version: int, others: bool = False) -> Leased:
        """Lease the next group to `worker` at `version`: parked ones first, then failed ones, then new ones. What failed at that worker waits for
        another one, if there are `others`."""
        if self.parked:
            group_id = next(iter(self.parked))
            parked = self.parked.pop(group_id)
            return self._lease(parked.index, worker, parked.admitted_at, parked.partial)
        for index, failed_at in itertools.islice(self.retry.items(), LOOKED_AT):
            if not (others and failed_at == worker):
                del self.retry[index]
                return self._lease(index, worker, version, None)
        self.next_index += 1
        return self._lease(self.next_index - 1, worker, version, None)

    def _lease(self, index: int, worker: bytes, version: int, partial: Partial | None) -> Leased:
        attempt = max(self.first_attempt, self.attempts.get(index, -1) + 1)
        self.attempts[index] = attempt
        group_id = f"g{index}"
        self.running[group_id] = Running(index, attempt, worker, version, partial)
        return Leased(group_id, index, attempt, version, self.failures.get(index, 0), partial)

    def finish(self, group: Group) -> bool:
        """Take a finished group; false if it is not the running attempt (a duplicate, or too late)."""
        lease = self.running.end(group.group_id, group.attempt)
        if lease is None:
            return False
        self.finished[group.group_id] = Finished(group, lease.admitted_at, self.num_finished)
        self.num_finished += 1
        return True

    def reject(self, group_id: str, attempt: int) -> bool:
        """Note that a group is finished and not wanted for training; false if it is not the running attempt. Its prompt does not come again."""
        lease = self.running.end(group_id, attempt)
        if lease is None:
            return False
        self.num_rejected += 1
        self._forget(lease.index)
        return True

    def park(self, partial: Partial) -> bool:
        """Take back a running lease with what was generated; the next worker goes on from there. False if it was not running."""
        lease = self.running.end(partial.group_id, partial.attempt)
        if lease is None:
            return False
        self.parked[partial.group_id] = Parked(lease.index, lease.admitted_at, partial)
        return True

    def fail(self, group_id: str, attempt: int, cause: str, fatal: bool = False) -> bool:
        """Note a failure of the running attempt; the group is tried again or set aside. False if it was not running."""
        lease = self.running.end(group_id, attempt)
        if lease is None:
            return False
        self.failures[lease.index] = self.failures.get(lease.index, 0) + 1
        if fatal or self.failures[lease.index] >= self.max_attempts:
            self.set_aside[lease.index] = cause[:MAX_CAUSE]
            self._forget(lease.index)
        else:
            self.retry[lease.index] = lease.worker
        return True

    def release(self, worker: bytes) -> int:
        """Give back all that a lost worker had leased (no fault of the groups); returns how many."""
        lost = list(self.running.of(worker))
        for group_id in lost:
            self._give_back(group_id)
        return len(lost)

    def _give_back(self, group_id: str) -> None:
        lease = self.running.pop(group_id)
        if lease.partial is not None:  # what an earlier worker had generated is still good
            self.parked[group_id] = Parked(lease.index, lease.admitted_at, lease.partial)
        else:
            self.retry[lease.index] = b""

    def reconcile(self, worker: bytes, held: set[tuple[str, int]], seen: float, now: float, patience_s: float) -> int:
        """Give back the leases that `worker` should have and does not (`LeaseTable.missing`); returns how many."""
        lost = self.running.missing(worker, held, seen, now, patience_s)
        for group_id in lost:
            self._give_back(group_id)
        return len(lost)

    def adopt(self, worker: bytes, held: HeldLease, admitted_at: int, may_admit: bool) -> bool:
        """Take over a lease that `worker` says it holds, perhaps from before this incarnation; false if it is not wanted (any more).

        It is wanted if it is running with nobody else; if it went on from the partial that the group is parked with; or if the group
        waits, or is not known here because it was leased after the checkpoint that this incarnation began with: then it is admitted,
        if `may_admit`, at the version that the lease's own counts as (`admitted_at`).
        """
        index, lease = index_of(held.group_id), self.running.get(held.group_id)
        if held.attempt >= self.first_attempt + ATTEMPTS_PER_EPOCH or index - self.next_index + len(self.retry) > MAX_SKIPPED:
            return False  # of no lease that there has been
        if index >= self.next_index and not ATTEMPTS_PER_EPOCH <= held.attempt < self.first_attempt:
            return False  # what this incarnation has leased is known, and before the first there was none
        if lease is not None:
            if lease.attempt == held.attempt and lease.worker == worker:
                lease.missed_since = None
                return True
            return False
        if held.attempt < self.attempts.get(index, 0) or held.group_id in self.finished or index in self.set_aside:
            return False
        parked = self.parked.get(held.group_id)
        if parked is not None:
            if held.attempt <= parked.partial.attempt:
                return False
            del self.parked[held.group_id]  # it went on from there
            self.attempts[index] = held.attempt
            self.running[held.group_id] = Running(index, held.attempt, worker, parked.admitted_at, parked.partial)
            return True
        if not may_admit:
            return False
        if index >= self.next_index:
            self.retry.update(dict.fromkeys(range(self.next_index, index), b""))
            self.next_index = index + 1
        elif self.retry.pop(index, None) is None:
            return False  # in training, consumed or rejected
        self.attempts[index] = held.attempt
        self.running[held.group_id] = Running(index, held.attempt, worker, admitted_at)
        return True

    def waiting_to_be_consumed(self) -> list[FinishedGroup]:
        """The finished groups as the staleness policy sees them."""
        return [FinishedGroup(group_id, entry.admitted_at, entry.order) for group_id, entry in self.finished.items()]

    def running_versions(self) -> Counter[int]:
        """How many groups of each version it was admitted at are running or parked."""
        return Counter(self.running.versions) + Counter(self.parked.versions)

    def unconsumed_versions(self) -> Counter[int]:
        """The same of the groups that have no batch yet: running, parked or finished."""
        return self.running_versions() + Counter(self.finished.versions)

    def take(self, group_ids: Iterable[str]) -> list[Group]:
        """Take finished groups for a batch; none is taken again, unless `return_to_buffer` brings it back. Raises KeyError."""
        taken = {group_id: self.finished.pop(group_id) for group_id in group_ids}
        self.in_training |= taken
        return [entry.group for entry in taken.values()]

    def consume(self, group_ids: Iterable[str]) -> None:
        """Note that the step of these groups in training is finished. Raises KeyError."""
        for group_id in group_ids:
            del self.in_training[group_id]
            self.num_consumed += 1
            self._forget(index_of(group_id))

    def return_to_buffer(self) -> None:
        """Undo `take`: the steps of all that is in training are given up."""
        self.finished.update(self.in_training)
        self.in_training = {}

    def _forget(self, index: int) -> None:
        # Bounded memory: nothing more can happen to this index.
        self.attempts.pop(index, None)
        self.failures.pop(index, None)

"""What must hold in a run at every moment, judged from its journal, over all its incarnations. Pure.

    each prompt once      every prompt that was leased is one of: waiting, running, parked, finished, in training, consumed, rejected, set aside
    none lost             their numbers add up; a new incarnation begins with exactly what its line of ancestors has consumed, and steps follow one
                          another; those at an incarnation's end that are not in the journal count as whole batches, and are named
    lineage               no token is of the future, or younger than the step that its lost line was set back to
    staleness             nothing is admitted beyond eta; with the hard bound (or eta = 0) no consumed token is older than eta
    leases                a lease has one number for good, is with a worker that is there, and within what that takes; a result counts once
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from workers.config import Bound
from workers.coordinator.core import Coordinator
from workers.coordinator.groups.group_states import Running, index_of
from workers.coordinator.groups.group_tables import LeaseTable
from workers.coordinator.groups.lease_routing import room_of
from workers.coordinator.recording.inputs import Arrived, Outcome
from workers.coordinator.recording.replaying import Step
from workers.coordinator.registered_worker import Worker
from workers.coordinator.training.step_records import StepRecord
from workers.messages.from_coordinator import Acknowledged, Batch, Leases
from workers.messages.from_worker import GroupFinished, GroupRejected
from workers.messages.parts import Purpose

EVERY = 50
"""After so many inputs all groups are looked at; their numbers after each."""


class Auditor:
    """Looks at every step of a replay. `findings`: what does not hold, with its place, each kind once; `notes`: what the journal does not tell."""

    def __init__(self) -> None:
        self.findings: list[str] = []
        self.notes: list[str] = []
        self._step = 0  # the newest that was finished
        self._whole = True  # the journal is there from the run's first moment
        self._consumed: list[tuple[int, int, int]] = []  # epoch, step, prompt
        self._gone: set[int] = set()  # consumed, in this line of incarnations
        self._leased: set[tuple[str, int]] = set()
        self._taken: set[tuple[str, int]] = set()
        self._epoch = 0
        self._said: set[str] = set()

    def look(self, step: Step) -> None:
        """One step of a replay."""
        core, outcome = step.core, step.outcome
        if outcome is None or step.given is None:
            found = [*self._begins(step), *groups(core)]
        else:
            found = [*self._consumes(core, outcome), *self._batches(core, outcome), *self._leases(core, outcome), *numbers(core)]
            if isinstance(step.given, Arrived) and isinstance(step.given.message, GroupFinished | GroupRejected):
                found += self._results(outcome)
            if outcome.records or step.number % EVERY == 0:
                found += groups(core)
        for finding in found:
            kind = finding.partition(":")[0]
            if kind not in self._said:
                self._said.add(kind)
                self.findings.append(f"incarnation {core.epoch}, input {step.number}: {finding}")

    def _begins(self, step: Step) -> Iterator[str]:
        core, forks = step.core, step.core.lineage.forks
        self._step = max(core.training.step, core.training.restored_at)
        if step.gap or (step.number and not self._epoch):
            self._whole = False
        if core.epoch == self._epoch and not step.gap:
            return
        if self._epoch == 0 and core.training.restored_at:
            self._whole = False
        self._epoch = core.epoch
        self._taken.clear()
        lost_after = {epoch: min((at for later, at in forks.items() if later > epoch), default=1 << 62) for epoch in forks}
        line = [(epoch, at, index) for epoch, at, index in self._consumed if at <= lost_after.get(epoch, -1)]
        self._gone = {index for _, _, index in line}
        if self._whole:
            yield from self._inherits(core, len(line), {at for _, at, _ in line})
        if forks.get(core.epoch) != core.training.restored_at:
            yield f"lineage: begins with step {core.training.restored_at}, forks say {forks.get(core.epoch)}"

    def _inherits(self, core: Coordinator, num_consumed: int, steps: set[int]) -> Iterator[str]:
        """`num_consumed` prompts in `steps` are recorded in the line of incarnations before."""
        unrecorded = sorted(set(range(1, core.training.restored_at + 1)) - steps)
        if num_consumed + len(unrecorded) * core.policy.batch_groups != core.ledger.num_consumed:
            yield f"consumed prompts: {num_consumed} in the line of incarnations before, {core.ledger.num_consumed} in the state that it goes on from"
        elif unrecorded and (note := f"the journal lacks {len(unrecorded)} steps, from {unrecorded[0]} to {unrecorded[-1]}") not in self.notes:
            self.notes.append(note)

    def _consumes(self, core: Coordinator, outcome: Outcome) -> Iterator[str]:
        for record in outcome.records:
            if not isinstance(record, StepRecord):
                continue
            if record.step != self._step + 1:
                yield f"steps: step {record.step} follows step {self._step}"
            self._step = record.step
            if len(set(record.consumed)) != core.policy.batch_groups:
                yield f"batch: step {record.step} consumed {len(set(record.consumed))} prompts, must be {core.policy.batch_groups}"
            if twice := sorted(self._gone.intersection(record.consumed)):
                yield f"consumed twice: prompts {twice[:5]}, the second time in step {record.step}"
            self._gone.update(record.consumed)
            self._consumed += [(core.epoch, record.step, index) for index in record.consumed]
            bounded = core.policy.bound is Bound.hard or core.policy.eta == 0
            if bounded and not core.config.supervised and record.ages.max_token_age > core.policy.eta:
                yield f"staleness: step {record.step} consumed a token {record.ages.max_token_age} steps old, must be at most {core.policy.eta}"

    def _batches(self, core: Coordinator, outcome: Outcome) -> Iterator[str]:
        for _, message in outcome.sent:
            if not isinstance(message, Batch):
                continue
            for group in message.groups:
                epochs, steps = np.asarray(group.epochs), np.asarray(group.steps)
                if steps.max() > message.step or epochs.max() > core.epoch:
                    yield f"lineage, future: group {group.group_id} in the batch of step {message.step} has tokens of version " \
                          f"{epochs.max()}.{steps.max()}"
                if not np.array_equal(core.lineage.effective(epochs, steps), steps):
                    yield f"lineage, lost: group {group.group_id} has tokens that count as younger than their lost line was set back to"
                if index_of(group.group_id) in self._gone:
                    yield f"in training again: prompt {index_of(group.group_id)}, consumed before"

    def _leases(self, core: Coordinator, outcome: Outcome) -> Iterator[str]:
        receivers = Counter(peer for peer, message in outcome.sent if isinstance(message, Leases))
        for _, message in outcome.sent:
            for lease in message.leases if isinstance(message, Leases) else ():
                key = lease.group_id, lease.attempt
                if key in self._leased:
                    yield f"lease: attempt {lease.attempt} of {lease.group_id} was leased before"
                self._leased.add(key)
        for peer in receivers:
            worker = core.registry.workers.get(peer or b"")
            if worker is None or worker.held is None or worker.draining:
                yield "lease to one who takes none: the worker is gone, has no weights, or leaves"
            elif (free := _room(core, worker)) < 0:
                yield f"leases: {worker.name} has {-free} samples more than the {worker.capacity} that it takes"

    def _results(self, outcome: Outcome) -> Iterator[str]:
        for _, message in outcome.sent:
            if isinstance(message, Acknowledged) and message.accepted:
                key = message.group_id, message.attempt
                if key in self._taken:
                    yield f"result: attempt {message.attempt} of {message.group_id} counted twice"
                self._taken.add(key)


def numbers(core: Coordinator) -> Iterator[str]:
    """What the numbers of groups must add up to."""
    ledger, step = core.ledger, max(core.training.step, core.training.restored_at)
    held = len(ledger.running) + len(ledger.parked) + len(ledger.finished) + len(ledger.in_training) + len(ledger.retry)
    known = held + ledger.num_consumed + ledger.num_rejected + len(ledger.set_aside)
    if known != ledger.next_index:
        yield f"prompts: {ledger.next_index} have been leased, {known} are known of"
    if core.supervision is None and not core.policy.may_be(ledger.admitted, step):
        yield f"admission: {ledger.admitted} groups at version {step}, eta={core.policy.eta}, {core.policy.batch_groups} a batch"


def groups(core: Coordinator) -> Iterator[str]:
    """What must hold for all groups that are held."""
    ledger = core.ledger
    places = Counter([*ledger.retry, *ledger.set_aside, *(index_of(group_id) for part in (
        ledger.running, ledger.parked, ledger.finished, ledger.in_training) for group_id in part)])
    if twice := [index for index, count in places.items() if count > 1 or index >= ledger.next_index]:
        yield f"places: prompts {twice[:5]} are in two places at once, or have never been leased"
    if sorted(ledger.in_training) != sorted(group_id for batch in core.training.in_training for group_id in batch.group_ids):
        yield "in training: the ledger and the batches name other groups"
    there = core.registry.workers.keys() | core.reconciliation.expected
    if lost := [group_id for group_id, lease in ledger.running.items() if lease.worker not in there]:
        yield f"leases of nobody: {lost[:5]} run with a worker that is not there"
    for table in (ledger.running, ledger.parked, ledger.finished, core.evaluation.running):
        if table.versions != Counter(entry.admitted_at for entry in table.values()):
            yield "indexes: the numbers of groups by version are wrong"
    for running in (ledger.running, core.evaluation.running):
        if {peer: running.of(peer) for peer in running.workers()} != _by_worker(running):
            yield "indexes: the leases by worker are wrong"


def _by_worker(running: LeaseTable) -> dict[bytes, dict[str, Running]]:
    found: dict[bytes, dict[str, Running]] = {}
    for group_id, lease in running.items():
        found.setdefault(lease.worker, {})[group_id] = lease
    return found


def _room(core: Coordinator, worker: Worker) -> int:
    size, peer = {Purpose.training: core.config.workflow.group_size, Purpose.evaluation: core.config.evaluation.num_samples}, worker.peer
    leases = [(group_id, lease.attempt, size[Purpose.training]) for group_id, lease in core.ledger.running.items() if lease.worker == peer]
    leases += [(group_id, lease.attempt, size[Purpose.evaluation]) for group_id, lease in core.evaluation.running.items() if lease.worker == peer]
    return room_of(worker, leases, 0.0, max(size.values())).free

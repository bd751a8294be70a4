"""Leases that workers hold from before: from before a connection broke, or from before this incarnation. Pure.

    Register, Heartbeat (HeldLease ...) --> known and theirs: kept;  unknown, but wanted: taken over;  else: named, to be given up
    thought to be theirs, but not held  --> lost on its way: given back;  comes back all the same --> theirs again, if nobody else has it
    restored leases of workers who do not come back in `RETURN_S` --> given back
    what workers left in the run folder (coordinator/process/recovered_partials.py) --> taken, as if it had been sent
"""

from __future__ import annotations

import contextlib
import math

from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.ledger import LOST_AFTER_S, Ledger
from workers.coordinator.groups.lineage import Lineage
from workers.coordinator.groups.results import Answer, Result, Results
from workers.coordinator.groups.staleness import StalenessPolicy
from workers.coordinator.training.steps import Training
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import Acknowledged
from workers.messages.from_worker import GroupFinished, GroupParked, GroupRejected
from workers.messages.parts import Group, HeldLease, Partial, Purpose, Version

RETURN_S = 20.0
"""How long leases from before a restart wait for the workers that hold them."""


class Reconciliation:
    """Compares what workers hold with what they are thought to hold."""

    def __init__(self, ledger: Ledger, evaluation: Evaluation, policy: StalenessPolicy, training: Training, results: Results,
                 lineage: Lineage, totals: Totals, now: float) -> None:
        self.ledger, self.evaluation, self.policy, self.training = ledger, evaluation, policy, training
        self.results, self.lineage, self.totals = results, lineage, totals
        self.expected: set[bytes] = set()
        self._expected_until = now + RETURN_S

    def expect(self) -> None:
        """The ledger has been restored: wait for the workers of its leases."""
        self.expected = {lease.worker for lease in self.ledger.running.values()}

    def excuse(self, pause_s: float) -> None:
        """The coordinator did not run for so long until now: who has come meanwhile waits to be read."""
        self._expected_until += pause_s

    def give_up_absent(self, now: float) -> None:
        """Give back what is held by workers who have not come back."""
        if self.expected and now > self._expected_until:
            for peer in sorted(self.expected):  # a set's own order is another one in every process
                self.totals.num_retries += self.ledger.release(peer)
            self.expected.clear()

    def adopt(self, peer: bytes, leases: list[HeldLease], now: float) -> list[Acknowledged]:
        """A worker registers: take over what it holds; returns what it is to give up. The rest of what was thought to be its is lost."""
        self.expected.discard(peer)
        self._give_back_lost(peer, leases, math.inf, now, 0)  # first: it makes room for what the worker does hold
        unwanted = []
        for held in leases:
            if held.purpose is Purpose.evaluation:
                wanted = self.evaluation.running.owner(held.group_id, held.attempt) == peer
            else:
                wanted = held.version <= self.results.newest() and self._take_over(peer, held, self.lineage.step_of(held.version))
            if not wanted:
                unwanted.append(Acknowledged(held.group_id, held.attempt, False))
        return unwanted

    def reconcile(self, peer: bytes, leases: list[HeldLease], seen: int, now: float) -> list[Acknowledged]:
        """A worker's heartbeat, which has got the leases up to number `seen`; returns what it is to give up."""
        self._give_back_lost(peer, leases, seen, now, LOST_AFTER_S)
        return [Acknowledged(held.group_id, held.attempt, False) for held in leases
                if (self.evaluation if held.purpose is Purpose.evaluation else self.ledger).running.owner(held.group_id, held.attempt) != peer]

    def absorb(self, message: GroupFinished | GroupRejected | GroupParked) -> bool:
        """Take what a worker left in the run folder because it had no coordinator to hand it to; false if it is not wanted any more.
        Raises `MessageError`."""
        if not isinstance(message, GroupRejected):  # that of a prompt which this incarnation has not leased yet says nothing: it is sampled anew
            self._admit(message, b"")
        answer = self.results.take(message, None)
        return any(isinstance(one, Acknowledged) and one.accepted for one in answer.messages)

    def take(self, message: Result, peer: bytes) -> Answer:
        """Take a worker's result. What was taken for lost is its lease again, if nobody else has it and there is a place for it."""
        if isinstance(message, GroupFinished | GroupParked):
            piece = message.group if isinstance(message, GroupFinished) else message.partial
            lost = piece.purpose is Purpose.training and piece.group_id not in self.ledger.running
            if lost and self.ledger.attempts.get(index_of(piece.group_id)) == piece.attempt:
                with contextlib.suppress(MessageError):  # out of bounds: it stays lost
                    self._admit(message, peer)
        return self.results.take(message, peer)

    def _admit(self, message: GroupFinished | GroupParked, peer: bytes) -> None:
        piece: Group | Partial = message.group if isinstance(message, GroupFinished) else message.partial
        self.results.check(piece)
        if piece.purpose is Purpose.training and piece.group_id not in self.ledger.running:
            oldest = min(self.lineage.rebase(piece).steps.tolist(), default=self.training.restored_at)
            self._take_over(peer, HeldLease(piece.group_id, piece.attempt, piece.purpose, Version(self.training.epoch, oldest)), oldest)

    def _give_back_lost(self, peer: bytes, leases: list[HeldLease], seen: float, now: float, patience_s: float) -> None:
        names = {(held.group_id, held.attempt) for held in leases}
        for part in (self.ledger, self.evaluation):
            self.totals.num_retries += part.reconcile(peer, names, seen, now, patience_s)

    def _take_over(self, peer: bytes, held: HeldLease, admitted_at: int) -> bool:
        ledger, step = self.ledger, max(self.training.restored_at, self.training.step)
        next_batch = ledger.num_taken // self.policy.batch_groups
        may_admit = self.policy.may_return(ledger.admitted, step, admitted_at, ledger.unconsumed_versions(), next_batch)
        return ledger.adopt(peer, held, admitted_at, may_admit)

"""Hands out leases: evaluation prompts first, then training groups as far as staleness and concurrency allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.config import Config
from workers.coordinator.evaluation import Evaluation
from workers.coordinator.ledger import Ledger
from workers.coordinator.registry import Registry
from workers.coordinator.staleness import StalenessPolicy
from workers.messages.types import Lease, Leases, Purpose, Version


class Prompt(Protocol):
    """What the coordinator reads of a prompt."""

    @property
    def id(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def verifier(self) -> str: ...
    @property
    def reference(self) -> str: ...


class Prompts(Protocol):
    """Training prompts by index, endlessly, and the held-out ones."""

    def train(self, index: int) -> Prompt: ...
    def heldout(self) -> Sequence[Prompt]: ...


class LeaseOffice:
    """Decides who gets which prompt. A worker has `capacity` samples at once; what it has leased already counts against that."""

    def __init__(self, config: Config, prompts: Prompts, heldout: Sequence[Prompt], ledger: Ledger, evaluation: Evaluation,
                 registry: Registry, policy: StalenessPolicy) -> None:
        self.config, self.prompts, self.heldout, self.ledger = config, prompts, heldout, ledger
        self.evaluation, self.registry, self.policy = evaluation, registry, policy

    def may_train(self, step: int) -> bool:
        """Whether another training group may start at `step`; a parked one has been admitted already."""
        room = len(self.ledger.running) < self.config.rollout.concurrency
        return room and (bool(self.ledger.parked) or self.policy.may_admit(self.ledger.admitted, step))

    def assign(self, version: Version, training: bool) -> list[tuple[bytes, Leases]]:
        """Lease whatever can be leased now; `training`: whether training groups are still wanted."""
        size = self.config.workflow.group_size
        granted: dict[bytes, list[Lease]] = {}
        free = self._free()
        while free:
            evaluating = self.evaluation.has_work
            if not evaluating and not (training and self.may_train(version.step)):
                break
            cost = 1 if evaluating else size
            peer = max(free, key=lambda candidate: free[candidate])
            if free[peer] < cost:
                break
            free[peer] -= cost
            granted.setdefault(peer, []).append(self._lease(peer, version, evaluating))
        return [(peer, Leases(leases)) for peer, leases in granted.items()]

    def _free(self) -> dict[bytes, int]:
        """How many samples each worker that holds weights can still take, by peer."""
        free = {worker.peer: worker.capacity for worker in self.registry.ready()}
        for lease in self.ledger.running.values():
            if lease.worker in free:
                free[lease.worker] -= self.config.workflow.group_size
        for _, _, peer in self.evaluation.running.values():
            if peer in free:
                free[peer] -= 1
        return free

    def _lease(self, peer: bytes, version: Version, evaluating: bool) -> Lease:
        partial = None
        if evaluating:
            group_id, index, attempt = self.evaluation.lease(peer)
            prompt, purpose, variant = self.heldout[index], Purpose.evaluation, 0
        else:
            group_id, index, attempt, admitted_at, variant, partial = self.ledger.lease(peer, version.step)
            prompt, purpose, version = self.prompts.train(index), Purpose.training, Version(version.epoch, admitted_at)
        # By the number of failures, not by the attempt: a group that was lost with its worker is sampled again as it was.
        seed = (self.config.run.seed * 1_000_003 + index) * 64 + variant
        return Lease(group_id, attempt, purpose, version, prompt.id, prompt.text, prompt.verifier, prompt.reference, seed % 2**31, partial)

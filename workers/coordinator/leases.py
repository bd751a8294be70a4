"""Hands out leases: evaluation prompts first, then training groups as far as staleness and concurrency allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.config import Config
from workers.coordinator.evaluation import Evaluation
from workers.coordinator.ledger import Ledger
from workers.coordinator.registry import Registry
from workers.coordinator.staleness import StalenessPolicy
from workers.messages.types import Lease, Leases, Purpose, Role, Version


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
    """Decides who gets which prompt. Leases are paid for with the workers' credits, one a sample."""

    def __init__(self, config: Config, prompts: Prompts, heldout: Sequence[Prompt], ledger: Ledger, evaluation: Evaluation,
                 registry: Registry, policy: StalenessPolicy) -> None:
        self.config, self.prompts, self.heldout, self.ledger = config, prompts, heldout, ledger
        self.evaluation, self.registry, self.policy = evaluation, registry, policy

    def may_train(self, step: int) -> bool:
        """Whether another training group may start at `step`."""
        return len(self.ledger.running) < self.config.rollout.concurrency and self.policy.may_admit(self.ledger.admitted, step)

    def assign(self, version: Version, training: bool) -> list[tuple[bytes, Leases]]:
        """Lease whatever can be leased now; `training`: whether training groups are still wanted."""
        size = self.config.workflow.group_size
        granted: dict[bytes, list[Lease]] = {}
        while True:
            evaluating = self.evaluation.has_work
            if not evaluating and not (training and self.may_train(version.step)):
                break
            cost = 1 if evaluating else size
            ready = [worker for worker in self.registry.of(Role.rollout) if worker.held is not None and worker.credits >= cost]
            if not ready:
                break
            worker = max(ready, key=lambda candidate: candidate.credits)
            worker.credits -= cost
            granted.setdefault(worker.peer, []).append(self._lease(worker.peer, version, evaluating))
        return [(peer, Leases(leases)) for peer, leases in granted.items()]

    def _lease(self, peer: bytes, version: Version, evaluating: bool) -> Lease:
        if evaluating:
            group_id, index, attempt = self.evaluation.lease(peer)
            prompt, purpose = self.heldout[index], Purpose.evaluation
        else:
            group_id, index, attempt = self.ledger.lease(peer, version.step)
            prompt, purpose = self.prompts.train(index), Purpose.training
        seed = (self.config.run.seed * 1_000_003 + index) * 64 + attempt
        return Lease(group_id, attempt, purpose, version, prompt.id, prompt.text, prompt.verifier, prompt.reference, seed % 2**31)

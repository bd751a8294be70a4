"""Training steps, batches and evaluations as the coordinator sees them. Pure; core.py asks it and sends what it returns.

    StepFinished(v) -> version v announced -> evaluation due? -> BatchRequest(v) -> Batch -> StepFinished(v + 1)

The first step of an incarnation is the one that was restored (0 for a new run): its weights are published and announced like any
other's, as a version of the new epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import Config
from workers.coordinator.accounting import BatchAges, Totals, measure
from workers.coordinator.evaluation import Evaluation, Result
from workers.coordinator.ledger import Finished, Ledger, index_of
from workers.coordinator.registry import Registry
from workers.coordinator.staleness import StalenessPolicy
from workers.messages.types import Announcement, Batch, Message, StepFinished, Version


class Refusal(ValueError):
    """A message that does not fit to where training is; its text says why."""


@dataclass(frozen=True)
class StepRecord:
    """A finished training step: the trainer's metrics, the ages of what it consumed, and which prompts those were."""

    step: int
    ages: BatchAges
    metrics: dict[str, float]
    tokens_trained: int
    consumed: list[int]


@dataclass(frozen=True)
class InTraining:
    """The batch that the trainer works on."""

    entries: list[Finished]
    ages: BatchAges
    message: Batch


class Training:
    """Where training is. `restored_at`: the step that this incarnation begins with."""

    def __init__(self, config: Config, epoch: int, ledger: Ledger, evaluation: Evaluation, registry: Registry, policy: StalenessPolicy,
                 totals: Totals) -> None:
        self.config, self.epoch, self.ledger, self.evaluation = config, epoch, ledger, evaluation
        self.registry, self.policy, self.totals = registry, policy, totals
        self.restored_at = 0
        self.announcement: Announcement | None = None
        self.asking: bytes | None = None
        self.in_training: InTraining | None = None
        self.records: list[StepRecord | Result] = []
        self.early_reason = ""
        self.final_evaluation_due = False
        self.enough_replicas = False

    @property
    def step(self) -> int:
        """Completed training steps; before this incarnation's first weights are there, one less than it begins with."""
        return self.restored_at - 1 if self.announcement is None else self.announcement.version.step

    @property
    def is_over(self) -> bool:
        """Whether the last training step is done."""
        return self.step >= self.config.run.num_steps or bool(self.early_reason)

    @property
    def first_evaluation_runs(self) -> bool:
        """Whether the evaluation of the starting weights is going on, which the first batch waits for."""
        return self.evaluation.active and self.evaluation.step == 0 and self.step == 0

    def asked(self, peer: bytes, step: int) -> list[tuple[bytes | None, Message]]:
        """The trainer asks for the batch of `step`; asked twice, it gets the same again. Raises `Refusal`."""
        if step != self.step:
            raise Refusal(f"batch of step {step}: this is step {self.step}")
        if self.in_training is not None:
            return [(peer, self.in_training.message)]
        self.asking = peer
        return []

    def step_finished(self, message: StepFinished) -> None:
        """Take note of newly published weights. Raises `Refusal` where they are not the next ones."""
        version = message.announcement.version
        if version != Version(self.epoch, self.step + 1):
            raise Refusal(f"version {version}: the next one is {self.epoch}.{self.step + 1}")
        first = self.announcement is None
        self.announcement = message.announcement
        if self.in_training is not None:
            self.totals.num_steps += 1
            self.totals.tokens_trained += message.tokens_trained
            consumed = sorted(index_of(entry.group.group_id) for entry in self.in_training.entries)
            self.records.append(StepRecord(version.step, self.in_training.ages, message.metrics, message.tokens_trained, consumed))
            self.in_training = None
        every = self.config.evaluation.every_steps
        due = version.step == 0 or (every and version.step % every == 0 and not first and not self.is_over)
        if due and not self.evaluation.active and not (first and self.totals.num_evaluations):
            self.evaluation.start(version.step)
        self.final_evaluation_due = self.final_evaluation_due or self.is_over

    def give_up_batch(self) -> None:
        """The batch in training goes back to the buffer: its step was given up."""
        if self.in_training is not None:
            self.ledger.return_to_buffer(self.in_training.entries)
            self.totals.forget(self.in_training.ages)
        self.in_training = self.asking = None

    def evaluate(self) -> str | None:
        """Take the evaluation's result if it is there, and start the last one where it is due; returns the cause if that ends the run."""
        result = self.evaluation.result()
        if result is not None:
            self.records.append(result)
            self.totals.num_evaluations += 1
            if result.num_failed == result.num_prompts:
                return f"every prompt of the evaluation at step {result.step} failed; one because: {self.evaluation.failed[0]}"
            if self.is_over and result.step == self.step:
                return ""
            if self._reached(result.accuracy):
                self.early_reason = f"held-out accuracy {result.accuracy:.3f} reached run.target_accuracy={self.config.run.target_accuracy}"
                if result.step == self.step and self.in_training is None:
                    return ""
                self.final_evaluation_due = True
        if self.final_evaluation_due and not self.evaluation.active and self.in_training is None:
            self.final_evaluation_due = False
            self.evaluation.start(self.step)
        return None

    def _reached(self, accuracy: float) -> bool:
        target = self.config.run.target_accuracy
        return target is not None and accuracy >= target and not self.is_over

    def form_batch(self) -> list[tuple[bytes | None, Message]]:
        """The next batch, to whoever asked for it, if it can be formed."""
        self.enough_replicas = self.enough_replicas or len(self.registry.ready()) >= self.config.allocation.min_replicas
        if self.asking is None or self.announcement is None or self.is_over or self.first_evaluation_runs or not self.enough_replicas:
            return []
        chosen = self.policy.choose(self.step, self.ledger.waiting_to_be_consumed(), self.ledger.running_versions())
        if chosen is None:
            return []
        # In the order of the prompts, so that minibatches do not depend on who finished first: at eta=0 runs repeat.
        entries = self.ledger.consume(sorted(chosen, key=index_of))
        groups = [entry.group for entry in entries]
        message = Batch(self.step, groups, self.registry.needed(self.announcement.version))
        self.in_training = InTraining(entries, measure(self.step, groups), message)
        self.totals.consumed(self.in_training.ages)
        peer, self.asking = self.asking, None
        return [(peer, message)]

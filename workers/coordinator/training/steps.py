"""Training steps, batches and evaluations as the coordinator sees them. Pure; core.py asks it and sends what it returns.

    StepFinished(v) -> version v announced -> evaluation due? -> BatchRequest(v) -> Batch (a share for each copy) -> StepFinished(v + 1)
                                                  BatchRequest(v + 1), while v is computed -> Batch, as soon as it can be formed

A batch is formed for the step that consumes it: its ages are reckoned by that step, and so is what is left for later batches. It may be
formed while the version before is still the newest; the proof in staleness.py covers what is admitted then. Until its step is finished a
checkpoint holds its groups as not trained on (ledger.py).

A supervised run has no evaluation by generation: the trainer brings the held-out loss with the version that it is of (`HELDOUT_LOSS`).

The first step of an incarnation is the one that was restored (0 for a new run): its weights are published and announced like any
other's, as a version of the new epoch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from workers.config import Config
from workers.coordinator.groups.consumption import BatchAges, Totals, measure
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.rejections import Rejections
from workers.coordinator.groups.staleness import StalenessPolicy
from workers.coordinator.training.batch_split import make_shares
from workers.coordinator.training.step_records import HeldoutGroup, HeldoutLoss, Record, StepRecord
from workers.coordinator.worker_registry import Registry
from workers.messages.from_coordinator import Batch
from workers.messages.from_worker import BatchRequest, Republished, StepFinished
from workers.messages.groups import kept
from workers.messages.parts import Announcement, Group, Message, Purpose, Version

HELDOUT_LOSS, HELDOUT_TOKENS = "heldout_loss", "heldout_tokens"
"""Metrics of a supervised run's StepFinished: nats per token of the held-out responses, and how many tokens these have."""
Sending = list[tuple[bytes | None, Message]]
"""Messages and whom they are for."""


class Refusal(ValueError):
    """A message that does not fit to where training is; its text says why."""


@dataclass(frozen=True)
class InTraining:
    """A batch that the trainer works on, or has for its next step; `shares`: what each copy of the model gets."""

    step: int
    group_ids: list[str]
    ages: BatchAges
    shares: list[Batch]


class Asked(NamedTuple):
    """A request for a share of a batch that is not there yet."""

    peer: bytes
    step: int


class Training:
    """Where training is. `restored_at`: the step that this incarnation begins with. `in_training`: the batch of the present step, then that
    of the next one, as far as they are formed; `notices`: lines for the log, as in `State`."""

    def __init__(self, config: Config, epoch: int, ledger: Ledger, evaluation: Evaluation, registry: Registry, policy: StalenessPolicy,
                 totals: Totals, rejections: Rejections) -> None:
        self.config, self.epoch, self.ledger, self.evaluation = config, epoch, ledger, evaluation
        self.registry, self.policy, self.totals, self.rejections = registry, policy, totals, rejections
        self.restored_at = 0
        self.notices: list[str] = []
        self.announcement: Announcement | None = None
        self.in_training: list[InTraining] = []
        self.records: list[Record] = []
        self.early_reason = ""
        self.final_evaluation_due = False
        self.enough_replicas = config.supervised
        self._asked: dict[int, Asked] = {}
        self.num_shares = 0
        self._left_out_for = -1

    @property
    def step(self) -> int:
        """Completed training steps; before this incarnation's first weights are there, one less than it begins with."""
        return self.restored_at - 1 if self.announcement is None else self.announcement.version.step

    @property
    def next_batch(self) -> int:
        """The step of the batch that is formed next."""
        return self.step + len(self.in_training)

    @property
    def is_over(self) -> bool:
        """Whether the last training step is done."""
        return self.step >= self.config.run.num_steps or bool(self.early_reason)

    @property
    def first_evaluation_runs(self) -> bool:
        """Whether the evaluation of the starting weights is going on, which the first batch waits for."""
        return self.evaluation.active and self.evaluation.step == 0 and self.step == 0

    @property
    def trainer_waits(self) -> bool:
        """Whether the trainer can do nothing without the batch of the present step."""
        return 0 in self._asked and self._asked[0].step == self.step

    def asked(self, peer: bytes, request: BatchRequest) -> Sending:
        """A leader asks for its share of a batch; asked twice, it gets the same again. Raises `Refusal`."""
        self._check(request)
        if request.share == 0:  # the trainer's word; other leaders' may come first
            self.num_shares = request.num_shares
        for batch in self.in_training:
            if batch.step == request.step and request.share < len(batch.shares):
                return [(peer, batch.shares[request.share])]
        self._asked[request.share] = Asked(peer, request.step)
        return []

    def _check(self, request: BatchRequest) -> None:
        if request.share >= request.num_shares or self.num_shares not in (0, request.num_shares):
            raise Refusal(f"share {request.share} of {request.num_shares}: batches are divided into {self.num_shares or request.num_shares} shares")
        # The trainer asks for one batch after the other. Another leader's word may overtake the trainer's that the step before is finished.
        ahead = min(1, len(self.in_training)) if request.share == 0 else 2
        if not self.step <= request.step <= self.step + ahead:
            raise Refusal(f"batch of step {request.step}: this is step {self.step}")

    def step_finished(self, message: StepFinished, held_back: float) -> None:
        """Take note of newly published weights, and of how much of the engines' room staleness left empty meanwhile. Raises `Refusal` where they
        are not the next ones."""
        version = message.announcement.version
        if version != Version(self.epoch, self.step + 1):
            raise Refusal(f"version {version}: the next one is {self.epoch}.{self.step + 1}")
        if HELDOUT_LOSS in message.metrics and not math.isfinite(message.metrics[HELDOUT_LOSS] + message.metrics.get(HELDOUT_TOKENS, math.nan)):
            raise Refusal(f"version {version}: {HELDOUT_LOSS} and {HELDOUT_TOKENS} must both be there, and finite")
        first = self.announcement is None
        self.announcement = message.announcement
        if self.in_training:
            batch = self.in_training.pop(0)
            self.ledger.consume(batch.group_ids)
            self.totals.consumed(batch.ages)
            if self.policy.lead is not None and not self.config.supervised:
                self.policy.lead.finished(version.step, message.metrics, batch.ages.mean_token_age, self.policy.furthest(version.step),
                                          self._ready(), held_back, moved=version.step > self.config.algorithm.critic_warmup_steps)
            consumed = [index_of(group_id) for group_id in batch.group_ids]
            shown = [batch.shares[0].groups[index] for index in kept(batch.shares[0].minibatches, self.config.rollout.keep)]
            self.records.append(StepRecord(version.step, batch.ages, message.metrics, consumed, self.rejections.next_step(), held_back, shown))
        if self.config.supervised:
            if HELDOUT_LOSS in message.metrics:
                self.records.append(HeldoutLoss(version.step, message.metrics[HELDOUT_LOSS], int(message.metrics[HELDOUT_TOKENS])))
            return
        if not self.config.evaluation.enabled:
            return
        every = self.config.evaluation.every_steps
        due = version.step == 0 or (every and version.step % every == 0 and not first and not self.is_over)
        if due and not self.evaluation.active and not (first and self.totals.num_evaluations):
            self.evaluation.start(version.step)
        elif due and not first and self._left_out_for != self.evaluation.step:
            self._left_out_for = self.evaluation.step
            self.notices.append(f"the evaluation of step {version.step} is left out, as that of step {self.evaluation.step} goes on: evaluations "
                                f"take longer than evaluation.every_steps={every} steps")
        self.final_evaluation_due = self.final_evaluation_due or self.is_over

    def _ready(self) -> float:
        """Batches that wait for the trainer, with the next one; 0 where that cannot be formed yet."""
        if not self.in_training and not self.policy.may_form(self.next_batch, self.ledger.finished.versions, self.ledger.running_versions()):
            return 0.0
        return len(self.in_training) + len(self.ledger.finished) / self.config.trainer.batch_groups

    def finished(self, group: Group) -> None:
        """Take note of a group that has been taken: held-out ones are kept to be read."""
        if group.purpose is Purpose.evaluation and self.config.rollout.keep:
            self.records.append(HeldoutGroup(self.evaluation.step, group))

    def republished(self, message: Republished) -> bool:
        """Take note that the newest version can be had in more ways; false if that is known, or a newer one is there. Raises `Refusal`."""
        known, version = self.announcement, message.announcement.version
        if known is None or version > known.version or (version == known.version and message.announcement.digest != known.digest):
            raise Refusal(f"version {version}, published again: it was not announced before, or with another digest")
        if not message.announcement.offers_more_than(known):
            return False
        self.announcement = message.announcement
        return True

    def give_up_batches(self) -> None:
        """What is in training goes back to the buffer: no further step will be finished."""
        self.ledger.return_to_buffer()
        self.in_training.clear()
        self._asked.clear()

    def evaluate(self) -> str | None:
        """Take the evaluation's result if it is there, and start the last one where it is due; returns the cause if that ends the run."""
        if self.config.supervised or not self.config.evaluation.enabled:
            return "" if self.is_over else None
        result = self.evaluation.result()
        if result is not None:
            self.records.append(result)
            self.totals.num_evaluations += 1
            if result.num_failed == result.num_prompts:
                return f"every prompt of the evaluation at step {result.step} failed; one because: {self.evaluation.failed[0]}"
            if self.is_over and result.step == self.step:
                return ""
            if self._reached(result.accuracy):
                figure = "score" if result.graded else "accuracy"
                self.early_reason = f"held-out {figure} {result.accuracy:.3f} reached run.target_accuracy={self.config.run.target_accuracy}"
                if result.step == self.step and not self.in_training:
                    return ""
                self.final_evaluation_due = True
        if self.final_evaluation_due and not self.evaluation.active and not self.in_training:
            self.final_evaluation_due = False
            self.evaluation.start(self.step)
        return None

    def _reached(self, accuracy: float) -> bool:
        target = self.config.run.target_accuracy
        return target is not None and accuracy >= target and not self.is_over

    def form_batch(self, now: float) -> Sending:
        """The next batch, if the trainer has asked for it and it can be formed: to each leader who has asked, its share."""
        self.enough_replicas = self.enough_replicas or self.registry.num_ready >= self.config.allocation.min_replicas
        step = self.next_batch
        wanted = 0 in self._asked and self._asked[0].step == step and step < self.config.run.num_steps and not self.early_reason
        if not wanted or self.announcement is None or self.first_evaluation_runs or not self.enough_replicas:
            return []
        if not self.policy.may_form(step, self.ledger.finished.versions, self.ledger.running_versions()):
            return []
        # In the order of the prompts, so that minibatches do not depend on who finished first: at eta=0 runs repeat.
        group_ids = sorted(self.policy.choose(self.ledger.waiting_to_be_consumed()), key=index_of)
        groups = self.ledger.take(group_ids)
        shares = make_shares(self.config, step, groups, self.num_shares, now)
        ages = measure(step, groups, self.config.workflow.max_new_tokens, self.config.engine.context_length)
        self.in_training.append(InTraining(step, group_ids, ages, shares))
        waiting = {share: asked.peer for share, asked in self._asked.items() if asked.step == step and share < len(shares)}
        self._asked = {share: asked for share, asked in self._asked.items() if share not in waiting}
        return [(peer, shares[share]) for share, peer in waiting.items()]

"""What the coordinator decides: a pure state machine over messages. Sockets, files and the clock are in worker.py.

    handle(peer, message, now)  tick(now)
        -> outbox:      (peer, message) to send; peer None is published to everyone
        -> records:     finished steps and evaluations, to be written to the metrics
        -> ended:       None while the run goes on; then the cause ('' is a complete run)

    rollout: Credit -> Leases -> GroupFinished -> ledger -> (staleness) -> Batch -> trainer: StepFinished -> version + 1

Who waits for whom: a rollout worker waits only where the staleness or the concurrency limit forbids a new group; the
trainer waits only until a batch can be formed; both reasons are put into words by waiting.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import Config
from workers.coordinator.accounting import BatchAges, Totals, measure
from workers.coordinator.evaluation import Evaluation, Result
from workers.coordinator.leases import LeaseOffice, Prompts
from workers.coordinator.ledger import Ledger
from workers.coordinator.registry import Registry, Worker
from workers.coordinator.staleness import StalenessPolicy
from workers.coordinator.waiting import waiting
from workers.messages.codec import MessageError
from workers.messages.groups import check_group
from workers.messages.types import (
    PROTOCOL,
    Acknowledged,
    Announcement,
    Batch,
    BatchRequest,
    Credit,
    Goodbye,
    GroupFailed,
    GroupFinished,
    Heartbeat,
    HeartbeatReply,
    Message,
    Purpose,
    Refused,
    Register,
    Role,
    StepFinished,
    Version,
    VersionAnnounced,
    Welcome,
    WorkerFailed,
)


@dataclass(frozen=True)
class StepRecord:
    """A finished training step: the trainer's metrics and the ages of what it consumed."""

    step: int
    ages: BatchAges
    metrics: dict[str, float]
    tokens_trained: int


class Coordinator:
    """The state of one incarnation (epoch) of a run."""

    def __init__(self, config: Config, prompts: Prompts, epoch: int, now: float) -> None:
        self.config, self.epoch = config, epoch
        self.policy = StalenessPolicy(config.staleness.eta, config.trainer.batch_groups, config.staleness.bound)
        self.ledger = Ledger(config.rollout.max_attempts)
        self.registry = Registry(config.transport.heartbeat_timeout_s, config.transport.reconnect_grace_s)
        heldout = prompts.heldout()
        self.evaluation = Evaluation(len(heldout), config.rollout.max_attempts)
        self.office = LeaseOffice(config, prompts, heldout, self.ledger, self.evaluation, self.registry, self.policy)
        self.totals = Totals()
        self.announcement: Announcement | None = None
        self.outbox: list[tuple[bytes | None, Message]] = []
        self.records: list[StepRecord | Result] = []
        self.ended: str | None = None
        self.last_progress = now
        self.early_reason = ""
        self.asking: bytes | None = None
        self._training: BatchAges | None = None
        self._final_evaluation_due = False
        self._failures_in_a_row = 0

    # -- what the rest asks -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Completed training steps; before the starting weights are there, -1."""
        return -1 if self.announcement is None else self.announcement.version.step

    @property
    def training_is_over(self) -> bool:
        """Whether the last training step is done."""
        return self.step >= self.config.run.num_steps or bool(self.early_reason)

    # -- what happens --------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Take one message. Unknown senders are told to register; wrong messages are refused with the reason."""
        if isinstance(message, Register):
            self._register(peer, message, now)
            return
        worker = self.registry.heard(peer, now)
        if worker is None:
            self.outbox.append((peer, HeartbeatReply(self.announcement, known=False)))
            return
        match message:
            case Heartbeat():
                worker.held, worker.fetching, worker.status = message.held, message.fetching, message.status
                self.outbox.append((peer, HeartbeatReply(self.announcement, known=True)))
            case Credit():
                worker.credits += message.num_samples
            case GroupFinished():
                self._finished(peer, message, now)
            case GroupFailed():
                self._failed(peer, message)
            case BatchRequest():
                self._asked(peer, message.step)
            case StepFinished():
                self._step_finished(worker, message, now)
            case WorkerFailed():
                self._lost(worker, message.cause)
            case Goodbye():
                self.registry.remove(peer)
                self._gone(worker)
            case _:
                self._refuse(peer, f"{type(message).__name__}: not a message for the coordinator")
        self._advance(now)

    def tick(self, now: float) -> None:
        """Notice what happens by time alone: lost workers, and a run in which nothing moves."""
        for worker, why in self.registry.lost(now):
            self._lost(worker, why)
        if self.ended is None and now - self.last_progress > self.config.run.stall_timeout_s:
            waits = "; ".join(f"{part} waits for {what}" for part, what in waiting(self).items() if what)
            waits = waits or f"the trainer is in step {self.step + 1}"
            self.end(f"nothing has moved for {now - self.last_progress:.0f} s (run.stall_timeout_s): {waits}")
        self._advance(now)

    def departed(self, peer: bytes) -> None:
        """Note that a worker's connection is gone while everyone leaves."""
        worker = self.registry.workers.get(peer)
        if worker is not None:
            self._lost(worker, "its connection broke while the run was ending")

    def greet(self) -> None:
        """Write to every worker: it hears that we live, and sending to a dead one fails, which is how it is noticed soon."""
        self.outbox.extend((peer, HeartbeatReply(self.announcement, known=True)) for peer in self.registry.workers)

    def end(self, cause: str) -> None:
        """End the run; only the first cause counts."""
        if self.ended is None:
            self.ended = cause

    # -- workers -------------------------------------------------------------------------------------------------------

    def _register(self, peer: bytes, message: Register, now: float) -> None:
        if message.protocol != PROTOCOL:
            self._refuse(peer, f"protocol {message.protocol}: this run speaks {PROTOCOL}. Use one version of Headway on all nodes")
            return
        if message.role is Role.trainer and any(worker.peer != peer for worker in self.registry.of(Role.trainer)):
            self._refuse(peer, "a trainer is registered already")
            return
        worker = self.registry.register(peer, message.role, message.host, message.pid, now)
        self.last_progress = now
        self.outbox.append((peer, Welcome(worker.slot, self.epoch, self.announcement)))

    def _refuse(self, peer: bytes, reason: str) -> None:
        self.outbox.append((peer, Refused(reason)))

    def _lost(self, worker: Worker, why: str) -> None:
        self.registry.remove(worker.peer)
        self._gone(worker, f"{worker.name} (process {worker.pid} on {worker.host}) was lost: {why}")

    def _gone(self, worker: Worker, cause: str = "") -> None:
        self.totals.num_retries += self.ledger.release(worker.peer) + self.evaluation.release(worker.peer)
        if self.ended == "" and cause and worker.role is Role.trainer:
            self.ended = cause  # complete, but the trained model could not be exported
        if self.ended is not None:
            return
        cause = cause or f"{worker.name} left before the run was over"
        if worker.role is Role.trainer:
            self.end(cause)
        elif len(self.registry.of(Role.rollout)) < self.config.allocation.min_replicas:
            self.end(f"{cause}. Fewer rollout workers are left than allocation.min_replicas={self.config.allocation.min_replicas}")

    # -- groups --------------------------------------------------------------------------------------------------------

    def _finished(self, peer: bytes, message: GroupFinished, now: float) -> None:
        group = message.group
        try:
            check_group(group)
        except MessageError as error:
            self._refuse(peer, str(error))
            self._failed(peer, GroupFailed(group.group_id, group.attempt, str(error)))
            return
        accepted = (self.evaluation if group.purpose is Purpose.evaluation else self.ledger).finish(group)
        self.outbox.append((peer, Acknowledged(group.group_id, group.attempt, accepted)))
        if accepted:
            self._failures_in_a_row, self.last_progress = 0, now
        else:
            self.totals.num_duplicates += 1

    def _failed(self, peer: bytes, message: GroupFailed) -> None:
        taken = self.ledger.fail(message.group_id, message.attempt, message.cause, message.fatal) or self.evaluation.fail(
            message.group_id, message.attempt, message.cause, message.fatal)
        self.outbox.append((peer, Acknowledged(message.group_id, message.attempt, taken)))
        if not taken:
            return
        self.totals.num_retries += 1
        self._failures_in_a_row += 1
        limit = max(8, 2 * self.config.rollout.max_attempts * self.policy.batch_groups)
        if self._failures_in_a_row >= limit:
            self.end(f"{limit} groups in a row have failed; the last one because: {message.cause}")

    def _asked(self, peer: bytes, step: int) -> None:
        if step == self.step:
            self.asking = peer
        else:
            self._refuse(peer, f"batch of step {step}: this is step {self.step}")

    # -- training ------------------------------------------------------------------------------------------------------

    def _step_finished(self, worker: Worker, message: StepFinished, now: float) -> None:
        version = message.announcement.version
        if worker.role is not Role.trainer or version != Version(self.epoch, self.step + 1):
            self._refuse(worker.peer, f"version {version}: the next one is {self.epoch}.{self.step + 1}")
            return
        self.announcement, self.last_progress = message.announcement, now
        self.outbox.append((None, VersionAnnounced(message.announcement)))
        if self._training is not None:
            self.totals.num_steps += 1
            self.totals.tokens_trained += message.tokens_trained
            self.records.append(StepRecord(version.step, self._training, message.metrics, message.tokens_trained))
            self._training = None
        every = self.config.evaluation.every_steps
        if version.step == 0 or (every and version.step % every == 0 and not self.evaluation.active and not self.training_is_over):
            self.evaluation.start(version.step)
        self._final_evaluation_due = self.training_is_over

    def _advance(self, now: float) -> None:
        if self.ended is not None or self.announcement is None:
            return
        self._evaluate(now)
        self.outbox.extend(self.office.assign(self.announcement.version, training=not self.training_is_over))
        self._form_batch()

    def _evaluate(self, now: float) -> None:
        result = self.evaluation.result()
        if result is not None:
            self.last_progress = now
            self.records.append(result)
            if result.num_failed == result.num_prompts:
                self.end(f"every prompt of the evaluation at step {result.step} failed; one because: {self.evaluation.failed[0]}")
            elif self.training_is_over and result.step == self.step:
                self.end("")
            elif self._reached(result.accuracy):
                self.early_reason = f"held-out accuracy {result.accuracy:.3f} reached run.target_accuracy={self.config.run.target_accuracy}"
                if result.step == self.step and self._training is None:
                    self.end("")
                self._final_evaluation_due = True
        if self._final_evaluation_due and not self.evaluation.active and self._training is None and self.ended is None:
            self._final_evaluation_due = False
            self.evaluation.start(self.step)

    def _reached(self, accuracy: float) -> bool:
        target = self.config.run.target_accuracy
        return target is not None and accuracy >= target and not self.training_is_over

    @property
    def first_evaluation_runs(self) -> bool:
        """Whether the evaluation of the starting weights is going on, which the first batch waits for."""
        return self.evaluation.active and self.evaluation.step == 0 and self.step == 0

    def _form_batch(self) -> None:
        if self.asking is None or self.training_is_over or self.first_evaluation_runs:
            return
        chosen = self.policy.choose(self.step, self.ledger.waiting_to_be_consumed(), self.ledger.running_versions())
        if chosen is None:
            return
        # In the order of the prompts, so that minibatches do not depend on who finished first: at eta=0 runs repeat.
        groups = self.ledger.consume(sorted(chosen, key=lambda group_id: int(group_id[1:])))
        self._training = measure(self.step, groups)
        self.totals.consumed(self._training)
        assert self.announcement is not None
        self.outbox.append((self.asking, Batch(self.step, groups, self.registry.needed(self.announcement.version))))
        self.asking = None

"""The state of a coordinator: its parts, each a state machine of its own, and what all that follows of them asks. Pure.

What happens to it, message by message, is core.py; what follows when a worker is gone, worker_loss.py.
"""

from __future__ import annotations

from workers.config import ClusterKind, Config
from workers.coordinator.groups.concurrency import Concurrency
from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.lead import Lead
from workers.coordinator.groups.leases import LeaseOffice, Prompts
from workers.coordinator.groups.ledger import ATTEMPTS_PER_EPOCH, Ledger
from workers.coordinator.groups.lineage import Lineage
from workers.coordinator.groups.rejections import Rejections
from workers.coordinator.groups.results import Results
from workers.coordinator.groups.staleness import StalenessPolicy
from workers.coordinator.groups.supervised_groups import Supervision, TrainingExamples
from workers.coordinator.reconciliation import Reconciliation
from workers.coordinator.snapshot import (
    Snapshot,
    leave_out,
    restore_evaluation,
    restore_ledger,
    restore_totals,
    save_evaluation,
    save_ledger,
    save_totals,
)
from workers.coordinator.training.steps import Training
from workers.coordinator.weights.broadcast_messages import Broadcasts
from workers.coordinator.weights.delivery import Delivery
from workers.coordinator.worker_registry import Registry
from workers.messages.from_coordinator import Drain
from workers.messages.from_worker import CheckpointRequest
from workers.messages.parts import Message, Role, Version

EVALUATION_LEASES_PER_EPOCH = 1_000_000


class State:
    """The state of one incarnation (epoch) of a run; `snapshot`: what it goes on from; `examples`: what a supervised run trains on."""

    def __init__(self, config: Config, prompts: Prompts, epoch: int, now: float, snapshot: Snapshot | None = None,
                 examples: TrainingExamples | None = None) -> None:
        self.config, self.epoch = config, epoch
        self.notices: list[str] = []
        self.lead = Lead(config.staleness)
        self.policy = StalenessPolicy(config.staleness.eta, config.trainer.batch_groups, config.staleness.bound,
                                      config.staleness.target, config.staleness.warmup_steps, self.lead)
        self.concurrency = Concurrency(config.rollout.concurrency, config.trainer.batch_groups)
        self.ledger = Ledger(config.rollout.max_attempts, epoch * ATTEMPTS_PER_EPOCH)
        self.registry = Registry(config.transport.heartbeat_s, config.transport.heartbeat_timeout_s, config.transport.reconnect_grace_s)
        heldout = prompts.heldout()
        self.evaluation = Evaluation(len(heldout), config.rollout.max_attempts, num_leases=epoch * EVALUATION_LEASES_PER_EPOCH)
        self.totals, self.lineage = Totals(), Lineage({epoch: 0})
        self.office = LeaseOffice(config, prompts, heldout, self.ledger, self.evaluation, self.registry, self.policy, self.totals,
                                  self.concurrency)
        self.rejections = Rejections(config.workflow.keep, config.workflow.max_rejected, config.trainer.batch_groups)
        self.training = Training(config, epoch, self.ledger, self.evaluation, self.registry, self.policy, self.totals, self.rejections)
        self.supervision = Supervision(examples, self.ledger, config.trainer.batch_groups, config.engine.context_length) if examples else None
        self.results = Results(config, self.ledger, self.evaluation, self.totals, self.lineage, self.rejections, lambda: self.newest)
        self.delivery = Delivery(config.weights, self.registry)
        self.broadcasts = Broadcasts(epoch, self.registry)
        self.outbox: list[tuple[bytes | None, Message]] = []
        self.checkpoint: tuple[bytes, CheckpointRequest] | None = None
        self.ended: str | None = None
        self.left: str | None = None
        self.left_in_order = False
        self.drain_reason = ""
        self.suspending = False
        self.last_progress = self.ticked = now
        self.expected: set[Role] = set()
        self.gone: dict[Role, str] = {}
        self._drain_deadline = 0.0
        self.trainer_told = False
        self.failed_workers = 0
        self.reconciliation = Reconciliation(self.ledger, self.evaluation, self.policy, self.training, self.results, self.lineage, self.totals, now)
        if snapshot is not None:
            self._restore(snapshot)

    def _restore(self, snapshot: Snapshot) -> None:
        restore_ledger(self.ledger, snapshot.ledger)
        restore_evaluation(self.evaluation, snapshot.evaluation)
        restore_totals(self.totals, snapshot.totals)
        self.training.restored_at, self.training.early_reason = snapshot.step, snapshot.early_reason
        self.lineage.forks = {**snapshot.forks, self.epoch: snapshot.step}
        if snapshot.rejections is not None:
            self.rejections.restore(snapshot.rejections)
        if snapshot.concurrency is not None:
            self.concurrency.restore(snapshot.concurrency)
        if snapshot.lead is not None:
            self.lead.restore(snapshot.lead)
        self.notices += leave_out(self.ledger, self.results.check)
        self.reconciliation.expect()

    def snapshot(self, seconds: float, positions: dict[str, int]) -> Snapshot:
        """The state now, which is to be one between two steps; see `Snapshot` for the arguments."""
        training = self.training
        return Snapshot(training.step, self.epoch, save_ledger(self.ledger), save_evaluation(self.evaluation), save_totals(self.totals),
                        dict(self.lineage.forks), training.early_reason, seconds, positions, self.rejections.save(),
                        self.concurrency.save(), self.lead.save())

    @property
    def newest(self) -> Version:
        """The newest weights that a worker may have: those announced, or broadcast already to be announced soon."""
        return max(Version(self.epoch, max(self.training.step, self.training.restored_at)), self.broadcasts.group.sent)

    @property
    def goes_on(self) -> bool:
        """Whether nothing has ended or pauses the run."""
        return self.ended is None and self.left is None and not self.suspending and not self.drain_reason

    @property
    def replaceable(self) -> bool:
        """Whether lost workers, and this process itself, are followed by others."""
        return self.config.cluster.kind is ClusterKind.slurm

    @property
    def lacking(self) -> set[Role]:
        """Of which roles more workers are needed before training can go on."""
        lacks_rollouts = self.registry.num_ready < self.config.allocation.min_replicas
        lacks_rewards = self.config.rewards_apart and not self.registry.reward_endpoints()
        return ({Role.rollout} if lacks_rollouts else set()) | ({Role.reward} if lacks_rewards else set())

    def take_notices(self) -> list[str]:
        """Lines for the log; they are taken out."""
        said: list[str] = []
        for part in (self, self.training, self.delivery, self.broadcasts.group):
            said, part.notices = said + part.notices, []
        return said

    def end(self, cause: str) -> None:
        """End the run; only the first cause counts."""
        if self.ended is None:
            self.ended = cause

    def drain_trainer(self) -> None:
        """Have the trainer save everything and leave."""
        if not self.trainer_told:
            self.trainer_told = True
            self.outbox += [(worker.peer, Drain(self.drain_reason)) for worker in self.registry.of(Role.trainer)]

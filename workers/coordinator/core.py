"""What the coordinator decides: a pure state machine over messages. Sockets, files and the clock are in process/.

    handle(peer, message, now)  tick(now)
        -> outbox:      (peer, message) to send; peer None is published to everyone
        -> training.records:  finished steps and evaluations, to be written to the metrics
        -> checkpoint:  the trainer waits for this process's part of a checkpoint
        -> ended:       None while the run goes on; then the cause ('' is a complete run)
        -> left:        None while this incarnation goes on; then why it goes away, while the run waits for the next one

    rollout: Heartbeat (capacity) -> Leases -> GroupFinished -> ledger -> (staleness) -> Batch -> trainer: StepFinished -> version + 1
                                        |                                                 a share for each copy of the model
                                        +----> GroupRejected -> its place is free: Leases

Who waits for whom: a rollout worker waits only where the staleness or the concurrency limit forbids a new group; the
trainer waits only until a batch can be formed, and asks for the next one while it computes; both reasons are put into words by waiting_reasons.py.

A supervised run has no rollout workers: coordinator/groups/supervised_groups.py finishes groups from the data set.
"""

from __future__ import annotations

from pathlib import PurePosixPath

from workers.coordinator.monitoring.waiting_reasons import stalled
from workers.coordinator.registered_worker import Worker
from workers.coordinator.state import State
from workers.coordinator.training.steps import Refusal
from workers.coordinator.worker_loss import follow_up, went_wrong
from workers.messages.broadcasts import BroadcastReady, BroadcastWanted, UpdateGroupBroken, UpdateGroupJoined, UpdateGroupOpened
from workers.messages.from_coordinator import Drain, HeartbeatReply, Refused, RewardElements, VersionAnnounced, VersionsNeeded, Welcome
from workers.messages.from_worker import (
    PROTOCOL,
    BatchRequest,
    CheckpointRequest,
    Draining,
    Goodbye,
    GroupFailed,
    GroupFinished,
    GroupParked,
    GroupRejected,
    Heartbeat,
    LoadRequest,
    Register,
    Republished,
    SourcesRequest,
    StepFinished,
    TransportFailed,
    WorkerFailed,
)
from workers.messages.parts import Announcement, Message, Role
from workers.run.own_pause import own_pause

TICK_S = 0.25
LOOK_S = 1.0
"""So long the process may be busy with the run folder, which is no pause of its own."""
DRAIN_S = 60.0
"""How long workers may take to give back what they hold when the whole run is to pause."""


class Coordinator(State):
    """What happens to the state of one incarnation, message by message."""

    # -- what happens --------------------------------------------------------------------------------------------------

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Take one message. Unknown senders are told to register; wrong messages are refused with the reason."""
        if isinstance(message, Register):
            self._register(peer, message, now)
            return
        worker = self.registry.heard(peer, now)
        if worker is None:
            self.outbox.append((peer, HeartbeatReply(self.training.announcement, known=False)))
            return
        try:
            self._take(worker, message, now)
        except Refusal as error:
            self.outbox.append((peer, Refused(str(error))))
        self._advance(now)

    def _take(self, worker: Worker, message: Message, now: float) -> None:
        peer = worker.peer
        match message:
            case Heartbeat():
                if message.tokens_in_flight != worker.tokens_in_flight:  # a request has begun or ended
                    self.last_progress = now
                self.registry.beat(worker, message)
                self.delivery.beat(worker)
                self.outbox += [(peer, unwanted) for unwanted in self.reconciliation.reconcile(peer, message.leases, message.leases_seen, now)]
                self.outbox.append(self._reply(worker))
                if worker.role is Role.rollout and self.config.rewards_apart:
                    self.outbox.append((peer, RewardElements(self.registry.reward_endpoints())))
            case Draining() if worker.role in (Role.rollout, Role.reward):
                self.registry.drain(worker, message.reason)
            case GroupFinished() | GroupRejected() | GroupFailed() | GroupParked() if worker.role is Role.rollout:
                if not self.suspending:  # the state has been saved: the worker keeps it for the next coordinator
                    self._result(worker, message, now)
            case BatchRequest() if worker.role is (Role.trainer if message.share == 0 else Role.trainer_shard):
                self.outbox += self.training.asked(peer, message)
            case StepFinished() if worker.role is Role.trainer:
                self.training.step_finished(message, self.office.held_back.mean(now))
                self.office.decide(now)
                self.last_progress = now
                self._announce(message.announcement)
                self.broadcasts.announced(now)
                self.outbox.append((peer, VersionsNeeded(self.registry.needed(message.announcement.version))))
            case Republished() if worker.role is Role.trainer:
                if self.training.republished(message):
                    self._announce(message.announcement)
            case SourcesRequest() | LoadRequest() | TransportFailed() if worker.role is Role.rollout:
                if message.version > self.newest:
                    raise Refusal(f"version {message.version}: the newest that there is is {self.newest}")
                self.outbox += self.delivery.take(worker, message, now)
            case UpdateGroupOpened() | BroadcastWanted() if worker.role is Role.trainer:
                self.outbox += self.broadcasts.take(worker, message, now)
            case UpdateGroupJoined() | UpdateGroupBroken() | BroadcastReady() if worker.role in (Role.trainer, Role.rollout):
                self.outbox += self.broadcasts.take(worker, message, now)
            case CheckpointRequest() if worker.role is Role.trainer:
                self._checkpoint(peer, message, now)
            case WorkerFailed():
                self.lost(worker, message.cause, failed=True)
            case Goodbye():
                self.registry.remove(peer)
                follow_up(self, worker, message.reason and f"{worker.name} left: {message.reason}", in_order=bool(message.reason))
            case _:
                raise Refusal(f"{type(message).__name__}: not a message for the coordinator from a {worker.role.value} worker")

    def _announce(self, announcement: Announcement) -> None:
        self.delivery.announced(announcement)
        self.outbox.append((None, VersionAnnounced(announcement)))

    def _result(self, worker: Worker, message: GroupFinished | GroupRejected | GroupFailed | GroupParked, now: float) -> None:
        answer = self.reconciliation.take(message, worker.peer)
        self.outbox += [(worker.peer, one) for one in answer.messages]
        if answer.refused or answer.failure:
            went_wrong(self, worker, answer, now)
        if answer.progress:
            self.failed_workers, self.last_progress = 0, now
            self.registry.worked(worker)
            if isinstance(message, GroupFinished):
                self.concurrency.ended(message.group, now)
                self.training.finished(message.group)
        if answer.cause:
            self.end(answer.cause)

    def _checkpoint(self, peer: bytes, message: CheckpointRequest, now: float) -> None:
        if message.step != self.training.step:
            raise Refusal(f"checkpoint of step {message.step}: this is step {self.training.step}")
        path, name = PurePosixPath(message.folder), f".{self.epoch}.{message.step}.tmp"
        if not path.is_absolute() or path.parts[-2:] != ("checkpoints", name) or not {"..", "\0"}.isdisjoint([*path.parts, *message.folder]):
            raise Refusal(f"checkpoint of step {message.step} in {message.folder[:200]!r}: must be RUN/checkpoints/{name}")
        if message.final:
            self.training.give_up_batches()
            self.suspending = True
        self.last_progress = now
        self.checkpoint = (peer, message)

    def tick(self, now: float) -> None:
        """Notice what happens by time alone: lost workers, and a run in which nothing moves. To be called every `TICK_S` or so."""
        if pause_s := own_pause(now - self.ticked, LOOK_S):
            self.registry.excuse(pause_s, now)
            for part in (self.office.held_back, self.concurrency, self.broadcasts.group, self.delivery.permits, self.reconciliation):
                part.excuse(pause_s)
            self.last_progress, self._drain_deadline = min(now, self.last_progress + pause_s), self._drain_deadline + pause_s
        self.ticked = now
        for worker, why in self.registry.lost(now):
            self.lost(worker, why)
        self.registry.try_again(now)
        self.outbox += self.broadcasts.expire(now)
        self.delivery.expire(now)
        self.reconciliation.give_up_absent(now)
        if self.drain_reason and (now > self._drain_deadline or not self.registry.number(Role.rollout)):
            self.drain_trainer()
        self._watch(now)
        self._advance(now)
        if self.goes_on and self.training.announcement is not None and not self.training.is_over:
            self.outbox += self.broadcasts.consider(self.training.announcement.version, now)

    def _watch(self, now: float) -> None:
        if self.replaceable and self.lacking and self.lacking <= self.expected:
            self.last_progress = now  # jobs wait in the queue: status says so
        limit = self.config.run.stall_minutes * 60
        if self.ended is None and self.left is None and now - self.last_progress > limit:
            self.end(f"nothing has moved for {now - self.last_progress:.0f} s (run.stall_minutes): {stalled(self)}")

    def greet(self) -> None:
        """Write to workers, in turn: they hear that we live, and sending to a dead one fails, which is how it is noticed soon."""
        self.outbox += [self._reply(worker) for worker in self.registry.in_turn()]

    def _reply(self, worker: Worker) -> tuple[bytes, HeartbeatReply]:
        return worker.peer, HeartbeatReply(self.training.announcement, True, worker.num_leases, self.registry.interval_s)

    def drain(self, reason: str, now: float) -> None:
        """Pause the whole run: workers give back what they hold, then the trainer saves everything and leaves."""
        if self.drain_reason or self.ended is not None:
            return
        self.drain_reason, self._drain_deadline = reason, now + DRAIN_S
        self.outbox += [(worker.peer, Drain(reason)) for worker in self.registry.of(Role.rollout)]

    # -- workers -------------------------------------------------------------------------------------------------------

    def _register(self, peer: bytes, message: Register, now: float) -> None:
        if message.protocol != PROTOCOL:
            self._refuse(peer, f"protocol {message.protocol}: this run speaks {PROTOCOL}. Use one version of Headway on all nodes")
            return
        if message.role is Role.trainer and any(worker.peer != peer for worker in self.registry.of(Role.trainer)):
            self._refuse(peer, "a trainer is registered already")
            return
        if message.role is Role.reward and not (message.serves and self.config.rewards_apart):
            self._refuse(peer, "serves='': a reward element must say where it can be reached" if self.config.rewards_apart else
                         f"reward.placement={self.config.reward.placement.value}: this run has no reward elements")
            return
        self.registry.register(peer, message, now)
        self.last_progress = now
        self.outbox.append((peer, Welcome(self.epoch, self.training.announcement)))
        self.outbox += [(peer, unwanted) for unwanted in self.reconciliation.adopt(peer, message.leases, now)]
        if message.role is Role.trainer:
            self.outbox += self.delivery.wanted(peer)
        if self.drain_reason and (message.role is Role.rollout or (message.role is Role.trainer and self.trainer_told)):
            self.outbox.append((peer, Drain(self.drain_reason)))

    def _refuse(self, peer: bytes, reason: str) -> None:
        self.outbox.append((peer, Refused(reason)))

    def lost(self, worker: Worker, why: str, failed: bool = False) -> None:
        """Give up a worker, which may have said itself that it has failed; what it had leased goes to others."""
        self.registry.remove(worker.peer)
        follow_up(self, worker, f"{worker.name} (process {worker.pid} on {worker.host}) was lost: {why}", failed=failed)

    # -- training ------------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        training = self.training
        self.outbox += self.delivery.grant(now)
        if not self.goes_on or training.announcement is None:
            return
        cause = training.evaluate()
        if training.records:
            self.last_progress = now
        if cause is not None:
            self.end(cause)
            return
        if self.supervision is None:
            leases = self.office.assign(training.announcement.version, training=not training.is_over)
            self.outbox.extend(leases)
        elif training.next_batch < self.config.run.num_steps and (cause := self.supervision.fill(self.epoch, training.next_batch)):
            self.end(cause)
            return
        self.outbox.extend(training.form_batch(now))
        if self.supervision is None:
            self.office.watch(leases, training.step, now, training.trainer_waits)

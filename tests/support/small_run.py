"""A whole run in small, without processes: coordinators that come and go, rollout workers that survive them, a trainer, checkpoints.

Everything but `workers.coordinator.core` is played here, on the patterns of the real workers: rollout workers keep results until they are
acknowledged, present what they hold when they register, spill it when they leave without a coordinator; the trainer asks, steps,
saves, and gives up steps. Messages wait in queues, one for each direction of a connection, and are lost where a connection breaks.

Every token has a number of its own, so that it is known of each which group and which weights it came from.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from tests.support.indexes import check_indexes
from tests.support.ticking import moments
from workers.config import Bound, ClusterKind, Config
from workers.coordinator.core import Coordinator
from workers.coordinator.groups.group_states import index_of
from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.recording.inputs import Absorbed, AnyInput, Arrived, Outcome, Ticked, Unreachable, advance
from workers.coordinator.snapshot import decode
from workers.coordinator.training.step_records import StepRecord
from workers.data.prompt import Prompt
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.codec import from_workers, pack
from workers.messages.from_coordinator import Acknowledged, Batch, Drain, HeartbeatReply, Leases, Refused, Suspended, VersionAnnounced, Welcome
from workers.messages.from_worker import (
    BatchRequest,
    CheckpointRequest,
    Draining,
    Goodbye,
    GroupFailed,
    GroupFinished,
    GroupParked,
    GroupRejected,
    Heartbeat,
    Register,
    StepFinished,
    WorkerFailed,
)
from workers.messages.parts import Announcement, Group, HeldLease, Lease, Message, Partial, Purpose, Role, Version
from workers.trainer.coordinator_link.prefetch import Prefetch

TRAINER = b"trainer"
SAMPLES = 2
NUM_HELDOUT = 2
Key = tuple[str, int]
Token = tuple[int, int, int]
"""Its number, and the epoch and step that it is said to be of."""


class Prompts:
    """Endless prompts."""

    def train(self, index: int) -> Prompt:
        return Prompt(f"t{index}", f"question {index}", "numeric", "1")

    def heldout(self) -> list[Prompt]:
        return [Prompt(f"h{index}", "question", "numeric", "1") for index in range(NUM_HELDOUT)]


def make_config(eta: int, batch: int, bound: Bound, num_steps: int, every: int = 0, concurrency: int | str = 16, prefetch: bool = True) -> Config:
    config = Config()
    config.cluster.kind, config.cluster.max_consecutive_crashes = ClusterKind.slurm, 1_000_000
    config.staleness.eta, config.staleness.bound = eta, bound
    config.trainer.batch_groups, config.trainer.num_minibatches, config.trainer.prefetch = batch, 1, prefetch
    config.run.num_steps, config.run.stall_minutes = num_steps, 1e9
    config.workflow.keep, config.workflow.max_rejected = "spread", 1.0
    config.workflow.group_size, config.rollout.concurrency, config.rollout.max_attempts = SAMPLES, concurrency, 3
    config.evaluation.every_steps = every
    return config


def arrays(samples: list[list[Token]]) -> dict:
    """The token fields of a Group or Partial."""
    flat = np.array([token for sample in samples for token in sample], np.int32).reshape(-1, 3)
    return {"lengths": Int32.of(np.array([len(sample) for sample in samples], np.int32)), "tokens": Int32.of(flat[:, 0]),
            "logprobs": Float32.of(np.zeros(len(flat), np.float32)), "epochs": Int32.of(flat[:, 1]), "steps": Int32.of(flat[:, 2]),
            "run_lengths": Int32.of(np.ones(len(flat), np.int32))}


def samples_of(piece: Partial) -> list[list[Token]]:
    flat = iter(zip(piece.tokens.tolist(), np.repeat(piece.epochs, piece.run_lengths).tolist(),
                    np.repeat(piece.steps, piece.run_lengths).tolist(), strict=True))
    return [list(itertools.islice(flat, length)) for length in piece.lengths.tolist()]


def piece_of(message: Message) -> Group | Partial:
    if isinstance(message, GroupFinished):
        return message.group
    assert isinstance(message, GroupParked)
    return message.partial


@dataclass
class Work:
    """A lease that a rollout worker works on."""

    lease: Lease
    samples: list[list[Token]]


@dataclass
class Rollout:
    """A rollout worker. It follows the newest coordinator; `hidden` while the network keeps it from doing so."""

    world: World
    peer: bytes
    alive: bool = True
    hidden: bool = False
    epoch: int = 0
    suspended: bool = False
    welcomed: bool = False
    leases_seen: int = 0
    leaving: str = ""
    held: Version | None = None
    newest: Version | None = None
    running: dict[Key, Work] = field(default_factory=dict)
    results: dict[Key, tuple[HeldLease, Message]] = field(default_factory=dict)
    sending: deque[Message] = field(default_factory=deque)
    receiving: deque[Message] = field(default_factory=deque)

    @property
    def connected(self) -> bool:
        """Whether what is sent now can reach the coordinator of now."""
        return self.alive and not self.hidden and self.world.core is not None and self.epoch == self.world.epoch

    @property
    def in_touch(self) -> bool:
        return self.connected and self.welcomed and not self.suspended

    def leases(self) -> list[HeldLease]:
        works = [work.lease for work in self.running.values()]
        return [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in works] + \
            [held for held, _ in self.results.values()]

    # -- to the coordinator

    def register(self) -> None:
        self.sending.append(Register(Role.rollout, "node", 1, leases=self.leases(), job="1_1"))

    def beat(self) -> None:
        """What happens every second: follow the newest coordinator, and say what we hold."""
        if self.hidden or self.world.core is None:
            return
        if self.epoch != self.world.epoch:
            self.break_connection()
            self.epoch, self.suspended, self.welcomed, self.leases_seen = self.world.epoch, False, False, 0
            self.register()
        elif not self.suspended:
            capacity = 0 if self.leaving else self.world.capacity * SAMPLES
            self.sending.append(Heartbeat(held=self.held, capacity=capacity, leases=self.leases(), leases_seen=self.leases_seen))

    def say(self, message: Message) -> None:
        if self.connected:
            self.sending.append(message)

    def send_results(self) -> None:
        if self.in_touch:
            self.sending.extend(message for _, message in self.results.values())

    def keep(self, lease: Lease, message: Message) -> None:
        self.results[lease.group_id, lease.attempt] = (HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version), message)
        if self.in_touch:
            self.sending.append(message)

    def break_connection(self) -> None:
        self.sending.clear()
        self.receiving.clear()

    # -- from the coordinator

    def receive(self, message: Message) -> None:
        match message:
            case Welcome():
                self.welcomed = True
                self._announced(message.announcement)
                self.send_results()
                self.beat()
            case HeartbeatReply():
                self.leases_seen = message.leases_sent
                self._announced(message.announcement)
                if not message.known or not self.welcomed:
                    self.register()
            case VersionAnnounced():
                self._announced(message.announcement)
            case Leases():
                for lease in message.leases:
                    self._start(lease)
            case Acknowledged():
                key = message.group_id, message.attempt
                self.results.pop(key, None)
                if not message.accepted:
                    self.running.pop(key, None)
            case Drain():
                self.leave(message.reason)
            case Suspended():
                self.suspended = True
            case _:
                raise AssertionError(message)

    def _announced(self, announcement: Announcement | None) -> None:
        if announcement is not None and (self.newest is None or announcement.version > self.newest):
            self.newest = announcement.version

    def _start(self, lease: Lease) -> None:
        key = lease.group_id, lease.attempt
        if key in self.running or key in self.results:
            return
        size = SAMPLES if lease.purpose is Purpose.training else 1
        work = Work(lease, samples_of(lease.partial) if lease.partial is not None else [[] for _ in range(size)])
        self.running[key] = work
        if self.leaving:
            self.park(key)

    # -- work

    def load(self) -> None:
        self.held = self.newest

    def able(self) -> list[Key]:
        """Leases whose version is loaded."""
        return [key for key, work in self.running.items() if self.held is not None and self.held >= work.lease.version]

    def generate(self, key: Key, sample: int) -> None:
        work = self.running[key]
        assert self.held is not None
        number = self.world.new_token(work.lease.group_id, self.held)
        work.samples[sample % len(work.samples)].append((number, self.held.epoch, self.held.step))

    def finish(self, key: Key) -> None:
        for sample in range(len(self.running[key].samples)):
            if not self.running[key].samples[sample]:
                self.generate(key, sample)
        work = self.running.pop(key)
        fields, lease, ones = arrays(work.samples), work.lease, np.ones(len(work.samples), np.float32)
        self.keep(lease, GroupFinished(Group(
            group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose, prompt_id=lease.prompt_id, prompt=Int32.of([1]),
            loss_mask=Bool.of(np.ones(fields["tokens"].size, bool)), rewards=Float32.of(ones), scores=Float32.of(ones), **fields)))

    def park(self, key: Key) -> None:
        work = self.running.pop(key)
        lease = work.lease
        if lease.purpose is Purpose.training:
            self.keep(lease, GroupParked(Partial(group_id=lease.group_id, attempt=lease.attempt, purpose=lease.purpose,
                                                 finished=Bool.of([False] * len(work.samples)), **arrays(work.samples))))

    def reject(self, key: Key) -> None:
        """Finish a group that is not to be trained on; evaluation prompts are never rejected."""
        if self.running[key].lease.purpose is Purpose.training:
            work = self.running.pop(key)
            self.keep(work.lease, GroupRejected(*key, sum(len(sample) for sample in work.samples), 0, 0.0))

    def fail(self, key: Key) -> None:
        lease = self.running.pop(key).lease
        self.keep(lease, GroupFailed(lease.group_id, lease.attempt, "the engine hiccupped"))

    # -- the end

    def leave(self, reason: str) -> None:
        """Told to go: give back everything."""
        if self.leaving:
            return
        self.leaving = reason
        self.say(Draining(reason))
        self.beat()
        for key in list(self.running):
            self.park(key)
        self.send_results()

    def depart(self) -> None:
        """Go; what has not been acknowledged is written down."""
        for key, (_, message) in self.results.items():
            if not isinstance(message, GroupFailed):
                self.world.files[key] = pack(message)
        if not self.suspended:
            self.say(Goodbye(self.leaving))
        self.results.clear()
        self.alive = False

    def die(self, with_a_word: bool) -> None:
        if with_a_word:
            self.say(WorkerFailed("the engine died"))
        else:
            self.sending.clear()
        self.alive = False


@dataclass
class Whole:
    """A batch of which all shares have arrived."""

    step: int
    groups: list[Group]


@dataclass
class Trainer:
    """The training loop of one incarnation, with a leader for each share of a batch; its coordinator is on the same node, so nothing is
    lost between them. `batch`: what is being computed. A version that is `on_its_way` is announced later, together with what was trained on
    for it; the next one waits for that, and so does a checkpoint."""

    world: World
    step: int
    published: bool = False
    batch: Whole | None = None
    told_to_drain: bool = False
    shares: dict[tuple[int, int], Batch] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    asking: Prefetch = field(default_factory=Prefetch)
    on_its_way: tuple[Announcement, Whole | None] | None = None

    @property
    def peers(self) -> list[bytes]:
        """Rank 0 and the leaders of the other shares."""
        return [TRAINER, *(f"leader {share}".encode() for share in range(1, self.world.num_shares))]

    def publish(self, step: int, batch: Whole | None) -> None:
        assert self.on_its_way is None
        self.step, self.published = step, True
        self.on_its_way = Announcement(Version(self.world.epoch, step), f"/weights/{self.world.epoch}.{step}", "digest"), batch

    def announce(self) -> None:
        """What is on its way is there."""
        if self.on_its_way is None:
            return
        (announcement, batch), self.on_its_way = self.on_its_way, None
        if batch is not None:
            self.world.consumes(batch)
        self.world.hand(TRAINER, StepFinished(announcement, {"loss": 0.5}))
        self.request(self.asking.announced(announcement.version.step))

    def go_on(self) -> None:
        """The next thing that it does."""
        if not self.published:
            for peer in self.peers:
                self.world.hand(peer, Register(Role.trainer if peer == TRAINER else Role.trainer_shard, "node", 2))
            self.ask(self.step)  # they do not wait for the weights
            self.publish(self.step, None)
        elif self.batch is not None:
            self.finish_step()
        elif (batch := self.whole(self.step)) is not None:
            self.batch = batch
            self.ask(self.step + 1)
            if self.world.config.trainer.prefetch:
                self.request(self.asking.want(self.step + 1, self.step))
        else:
            self.request(self.asking.want(self.step, self.step))

    def ask(self, step: int) -> None:
        """Each leader but rank 0 asks for its share, once."""
        for share, peer in enumerate(self.peers):
            if self.asked.get(share, -1) < step and share > 0:
                self.asked[share] = step
                self.world.hand(peer, BatchRequest(step, share, self.world.num_shares))

    def request(self, steps: list[int]) -> None:
        for step in steps:
            self.world.hand(TRAINER, BatchRequest(step, 0, self.world.num_shares))

    def whole(self, step: int) -> Whole | None:
        """The batch of `step`, if all shares are there."""
        shares = [self.shares[key] for key in sorted(self.shares) if key[0] == step]
        return Whole(step, [group for share in shares for group in share.groups]) if len(shares) == self.world.num_shares else None

    def finish_step(self) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        self.announce()
        if self.whole(self.step + 1) is not None:
            self.ask(self.step + 2)  # their connections may be faster than rank 0's
        self.publish(self.step + 1, batch)

    def receive(self, peer: bytes, message: Message) -> None:
        match message:
            case Batch():
                assert self.peers[message.share] == peer and message.num_shares == self.world.num_shares
                assert message.step in (self.step, self.step + 1) and (self.batch is None or message.step > self.batch.step)
                assert sorted(index for part in message.minibatches for index in part) == list(range(len(message.groups)))
                self.shares[message.step, message.share] = message
                if (batch := self.whole(message.step)) is not None:
                    self.world.check_batch(batch)
            case Drain():
                assert peer == TRAINER
                self.told_to_drain = True
            case Refused():
                raise AssertionError(message.reason)
            case _:
                pass

    @property
    def between_steps(self) -> bool:
        return self.published and self.batch is None


@dataclass
class Saved:
    """A checkpoint, and what the run had consumed and evaluated by then."""

    content: bytes
    epoch: int
    step: int
    consumed: dict[int, int]
    rejected: set[int]
    evaluations: list[int]
    broken: bool = False


class Notes:
    """What hears of every input of the coordinator, and of all else that is done to one; here: takes no notice."""

    def begin(self, core: Coordinator, now: float) -> None:
        """`core` is in a state that no inputs have led to."""

    def note(self, core: Coordinator, given: AnyInput, outcome: Outcome) -> None:
        """`given` has happened."""


class World:
    """The run, and everyone in it."""

    def __init__(self, config: Config, capacity: int = 3, num_workers: int = 2, num_shares: int = 1, notes: Notes | None = None) -> None:
        """`capacity`: how many groups a rollout worker takes at once. `num_shares`: leaders of the trainer. `notes`: hears of everything."""
        self.notes = notes or Notes()
        self.config, self.capacity, self.now, self.epoch, self.num_shares = config, capacity, 0.0, 0, num_shares
        self.eta, self.batch, self.bound = config.staleness.eta, config.trainer.batch_groups, config.staleness.bound
        self.core: Coordinator | None = None
        self.trainer: Trainer | None = None
        self.rollouts: list[Rollout] = []
        self.num_rollouts = 0
        self.saves: list[Saved] = []
        self.files: dict[Key, bytes] = {}
        self.seen: set[Key] = set()
        self.absorbed: list[Key] = []
        self.in_checkpoint: list[Key] = []
        self.parents: dict[int, tuple[int, int]] = {}
        self.born: list[tuple[str, int, int]] = []
        self.leased: set[Key] = set()
        self.consumed: dict[int, int] = {}
        self.rejected: set[int] = set()
        self.evaluations: list[int] = []
        self.ended: str | None = None
        self.failures = 0
        self._decoder = from_workers(1 << 30)
        for _ in range(num_workers):
            self.join()
        self.begin()

    # -- incarnations

    def begin(self) -> None:
        """A new incarnation, from the newest checkpoint that is whole."""
        assert self.core is None
        self.epoch += 1
        saved = next((saved for saved in reversed(self.saves) if not saved.broken), None)
        self.parents[self.epoch] = (saved.epoch, saved.step) if saved else (0, 0)
        self.consumed = dict(saved.consumed) if saved else {}
        self.rejected = set(saved.rejected) if saved else set()
        self.evaluations = list(saved.evaluations) if saved else []
        self.core = Coordinator(self.config, Prompts(), self.epoch, self.now, decode(saved.content) if saved else None)
        self.notes.begin(self.core, self.now)
        self.seen, self.absorbed, self.in_checkpoint = set(), [], []
        self.absorb()
        self.trainer = Trainer(self, saved.step if saved else 0)

    def absorb(self) -> None:
        """The coordinator takes what stands in partials/, as `Spilled` does."""
        assert self.core is not None
        if self.core.suspending:
            return
        for key in sorted(self.files.keys() - self.seen):
            self.seen.add(key)
            message = self._decoder.unpack(self.files[key])
            assert isinstance(message, GroupFinished | GroupRejected | GroupParked)
            if self.happen(Absorbed(self.now, message)).wanted:
                self.absorbed.append(key)
                self.takes(message)
            else:
                del self.files[key]

    def kill(self) -> None:
        """The whole training job dies, with whatever was on its way to it or from it."""
        for rollout in self.rollouts:
            rollout.break_connection()
        self.core = self.trainer = None

    def save(self, final: bool) -> None:
        """The trainer saves the state of its step; the coordinator's part is as `worker.py` makes it."""
        assert self.core is not None and self.trainer is not None
        self.trainer.announce()
        folder = f"/run/checkpoints/.{self.epoch}.{self.trainer.step}.tmp"
        assert self.hand(TRAINER, CheckpointRequest(self.trainer.step, folder, final)).checkpoint is not None
        content = self.core.snapshot(self.now, {}).encode()
        for key in self.in_checkpoint:
            self.files.pop(key, None)
        self.in_checkpoint, self.absorbed = self.absorbed, []
        self.saves = [*self.saves, Saved(
            content, self.epoch, self.trainer.step, dict(self.consumed), set(self.rejected), list(self.evaluations))][-2:]

    def suspend(self, reason: str) -> None:
        """The incarnation leaves in order: the trainer says goodbye, the coordinator tells everyone."""
        assert self.core is not None and self.trainer is not None
        for leader in self.trainer.peers[1:]:
            self.hand(leader, Goodbye(reason))
            assert self.core.left is None and self.core.ended is None
        self.hand(TRAINER, Goodbye(reason))
        assert reason in (self.core.left or "") and self.core.ended is None
        for rollout in self.rollouts:
            if rollout.connected and rollout.peer in self.core.registry.workers:
                rollout.receiving.append(Suspended(reason))
            rollout.sending.clear()
        self.core = self.trainer = None

    # -- workers

    def join(self) -> None:
        self.num_rollouts += 1
        self.rollouts.append(Rollout(self, f"rollout {self.num_rollouts}".encode()))

    @property
    def living(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.alive]

    def new_token(self, group_id: str, version: Version) -> int:
        self.born.append((group_id, version.epoch, version.step))
        return len(self.born) - 1

    # -- messages

    def happen(self, given: AnyInput) -> Outcome:
        """What the coordinator's process drives it by; what it answers is still to be sent."""
        assert self.core is not None
        outcome = advance(self.core, given)
        self.notes.note(self.core, given, outcome)
        return outcome

    def hand(self, peer: bytes, message: Message) -> Outcome:
        """The coordinator takes a message, and what it answers goes on its way."""
        assert self.core is not None
        num_rejected = self.core.ledger.num_rejected
        outcome = self.happen(Arrived(self.now, peer, message))  # type: ignore[arg-type]
        if self.core.ledger.num_rejected > num_rejected:
            self.takes(message)
        self.send(outcome)
        return outcome

    def takes(self, message: Message) -> None:
        """The coordinator has taken a result, for the first time."""
        if isinstance(message, GroupRejected):
            self.rejected.add(index_of(message.group_id))

    def deliver(self, rollout: Rollout, number: int = 1_000_000) -> None:
        """The coordinator gets what the worker has sent."""
        while number and rollout.sending and self.core is not None:
            if rollout.epoch != self.epoch:
                rollout.sending.clear()
                return
            number -= 1
            self.hand(rollout.peer, rollout.sending.popleft())

    def receive(self, rollout: Rollout, number: int = 1_000_000) -> None:
        """The worker gets what the coordinator has sent."""
        while number and rollout.receiving and rollout.alive:
            number -= 1
            rollout.receive(rollout.receiving.popleft())

    def tick(self) -> None:
        if self.core is not None:
            self.absorb()
            for outcome in [self.happen(Ticked(now)) for now in moments(self.core, self.now)]:
                self.send(outcome)

    def send(self, outcome: Outcome) -> None:
        assert self.core is not None
        for record in outcome.records:
            if isinstance(record, EvaluationResult):
                self.evaluations.append(record.step)
                if record.step in (0, self.config.run.num_steps):
                    assert record.first_step == record.last_step == record.step, "the first and the last evaluation are of one version each"
            elif isinstance(record, StepRecord):
                assert {index for index, step in self.consumed.items() if step == record.step - 1} == set(record.consumed)
        for peer, message in outcome.sent:
            self._send(peer, message)
        if self.core is not None and self.core.ended is not None:
            self.ended = self.core.ended

    def _send(self, peer: bytes | None, message: Message) -> None:
        assert self.core is not None and self.trainer is not None
        if isinstance(message, Leases):
            for lease in message.leases:
                key = lease.group_id, lease.attempt
                assert key not in self.leased, f"{key} was leased before: a late result would count for both"
                self.leased.add(key)
        if peer is None:
            for rollout in self.rollouts:
                if rollout.connected:
                    rollout.receiving.append(message)
        elif peer in self.trainer.peers:
            self.trainer.receive(peer, message)
        else:
            receivers = [rollout for rollout in self.rollouts if rollout.peer == peer and rollout.connected]
            for rollout in receivers:
                rollout.receiving.append(message)
            if not receivers:
                self.happen(Unreachable(self.now, peer))

    # -- what must hold

    def effective(self, epoch: int, step: int) -> int:
        """The newest step on the way to now that had a part in weights `epoch.step`: what they count as."""
        limits = {self.epoch: 1 << 30}
        ancestor, limit = self.parents[self.epoch]
        while ancestor:
            limits[ancestor] = limit
            ancestor, before = self.parents[ancestor]
            limit = min(limit, before)
        while epoch not in limits:
            if epoch == 0:
                return 0
            epoch, step = self.parents[epoch]
        return min(step, limits[epoch])

    def check_batch(self, batch: Whole) -> None:
        assert len({group.group_id for group in batch.groups}) == len(batch.groups) == self.batch
        for group in batch.groups:
            assert index_of(group.group_id) not in self.consumed, f"{group.group_id} is consumed twice"
            said = np.repeat(group.steps, group.run_lengths).tolist()
            for number, step in zip(group.tokens.tolist(), said, strict=True):
                owner, born_epoch, born_step = self.born[number]
                assert owner == group.group_id
                assert step == self.effective(born_epoch, born_step), (group.group_id, step, born_epoch, born_step)
                age = batch.step - step
                assert age >= 0, f"{group.group_id} has a token of the future: of {born_epoch}.{born_step} in batch {batch.step}"
                assert self.bound is not Bound.hard or age <= self.eta, f"{group.group_id} is {age} steps old"
                assert self.eta or age == 0, f"{group.group_id} is {age} steps old with eta=0"

    def consumes(self, batch: Whole) -> None:
        for group in batch.groups:
            assert index_of(group.group_id) not in self.consumed
            self.consumed[index_of(group.group_id)] = batch.step

    def check(self) -> None:
        """What holds at every moment."""
        if self.core is None:
            return
        ledger, training = self.core.ledger, self.core.training
        places = [*self.consumed, *self.rejected, *ledger.retry, *ledger.set_aside,
                  *(index_of(group_id) for part in (ledger.running, ledger.parked, ledger.finished, ledger.in_training) for group_id in part)]
        assert sorted(places) == list(range(ledger.next_index)), "every prompt is in exactly one place"
        assert sorted(ledger.in_training) == sorted(group_id for batch in training.in_training for group_id in batch.group_ids)
        assert [batch.step for batch in training.in_training] == [training.step, training.step + 1][: len(training.in_training)]
        assert self.eta or len(training.in_training) < 2, "what is sampled by the next version cannot be there yet"
        assert ledger.num_consumed == len(self.consumed) and ledger.num_rejected == len(self.rejected)
        assert ledger.admitted - ledger.num_taken <= (self.eta + 1) * self.batch
        assert ledger.admitted <= (max(training.step, training.restored_at) + self.eta + 1) * self.batch
        assert all(lease.worker for lease in ledger.running.values()), "a lease that nobody holds"
        check_indexes(self.core)

    def tokens(self) -> set[int]:
        """The tokens of training groups that have not been consumed and that the run can still use."""
        assert self.core is not None
        ledger, found = self.core.ledger, set[int]()
        pieces: list[Group | Partial] = [entry.group for part in (ledger.finished, ledger.in_training) for entry in part.values()]
        pieces += [parked.partial for parked in ledger.parked.values()]
        over = GroupFailed | GroupRejected
        failed = {key for rollout in self.living for key, (_, message) in rollout.results.items() if isinstance(message, over)}
        failed |= {key for key, content in self.files.items() if isinstance(self._decoder.unpack(content), over)}
        pieces += [lease.partial for group_id, lease in ledger.running.items()
                   if lease.partial is not None and (group_id, lease.attempt) not in failed]
        for key, content in self.files.items():
            if key not in failed and key[0] in ledger.running and ledger.running[key[0]].attempt == key[1]:
                pieces.append(piece_of(self._decoder.unpack(content)))
        for rollout in self.living:
            for key, work in rollout.running.items():
                if ledger.running.owner(*key) == rollout.peer:
                    found.update(number for sample in work.samples for number, _, _ in sample)
            for key, (_, message) in rollout.results.items():
                if ledger.running.owner(*key) == rollout.peer and isinstance(message, GroupFinished | GroupParked):
                    pieces.append(piece_of(message))
        return found.union(*(piece.tokens.tolist() for piece in pieces))

    # -- without trouble

    def talk(self) -> None:
        """A second in which everyone who is not hidden says what there is to say, and hears it."""
        self.now += 1.0
        for rollout in self.living:
            rollout.beat()
            rollout.send_results()
        for rollout in self.rollouts:
            self.deliver(rollout)
        if self.core is not None and self.trainer is not None:
            for peer in self.trainer.peers:
                self.hand(peer, Heartbeat())
        for rollout in self.living:
            self.receive(rollout)
            self.deliver(rollout)
            self.receive(rollout)
        self.rollouts = [rollout for rollout in self.rollouts if rollout.alive or rollout.sending]
        self.tick()

    def work(self, pace: int = 3, picky: bool = False) -> None:
        """Everyone does what can be done; with `pace` 0 to 2 not every lease gets finished. `picky`: every second training group is rejected."""
        for rollout in self.living:
            rollout.load()
            for position, key in enumerate(rollout.able()):
                if picky and position % 2 and key[0][0] == "g":
                    rollout.reject(key)
                elif position % 3 < pace:
                    rollout.finish(key)
                else:
                    rollout.generate(key, position)
            if rollout.leaving and not rollout.results:
                rollout.depart()
        if self.trainer is not None and pace != 1:
            self.trainer.announce()
        if self.trainer is not None and self.ended is None:
            self.trainer.go_on()

    def go_to_the_end(self) -> None:
        """No more trouble: the run must get to its end, soon."""
        limit = 40 + 12 * (self.config.run.num_steps + 2) * self.batch
        for _ in range(limit):
            if self.ended is not None:
                break
            if self.core is None:
                self.begin()
            if not any(not rollout.leaving for rollout in self.living):
                self.join()
            for rollout in self.rollouts:
                rollout.hidden = False
            self.talk()
            self.check()
            if self.ended is None:
                self.work()
                self.check()
        assert self.ended == "", f"not at its end in {limit} seconds without trouble: {self.ended}"
        assert len(self.consumed) == self.config.run.num_steps * self.batch
        assert len(set(self.evaluations)) == len(self.evaluations) and {0, self.config.run.num_steps} <= set(self.evaluations)

"""A run in virtual time: the real coordinator, between models of engines and of a trainer. No process, no socket, no clock.

    engines (samples run side by side, each new one slows the others) --GroupFinished--> Coordinator --Batch--> trainer (tokens at a fixed rate)
       ^                                                                     |                                      |
       +------------------------------ Leases, VersionAnnounced -------------+ <------------- StepFinished ---------+

Admission, bounds, leases, batches, ages and `rollout.concurrency=auto` are those of workers/coordinator, unchanged: only what sends messages to
it is modelled (simulated_workers.py).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from benchmarks.bounds.simulated_workers import EPOCH, MAX_TOKENS, Engine, Faults, Fleet, Work, drawn
from workers.config import Bound, ClusterKind, Config
from workers.coordinator.core import Coordinator
from workers.coordinator.ranking import Ranking
from workers.coordinator.training.step_records import StepRecord
from workers.data.prompt import Prompt
from workers.messages.from_coordinator import Batch, Leases, VersionAnnounced
from workers.messages.from_worker import BatchRequest, GroupFinished, Heartbeat, Register, StepFinished
from workers.messages.groups import token_steps
from workers.messages.parts import Announcement, HeldLease, Message, Role, Version
from workers.trainer.coordinator_link.prefetch import Prefetch

TRAINER = b"trainer"
NEWS = 16
"""An engine says at once that this part of its slots has become free; a real one beats every second."""


@dataclass(frozen=True)
class Setting:
    """One simulated run. Of its `num_steps` the first `warm_up` do not count. `target`: `staleness.target`. `changes`: at these steps engines
    come (+n) or are lost (-n)."""

    lengths: str
    eta: int
    bound: Bound
    concurrency: int | str
    target: float | None = None
    fleet: Fleet = field(default_factory=Fleet)
    group_size: int = 4
    batch_groups: int = 16
    num_steps: int = 120
    warm_up: int = 40
    seed: int = 0
    changes: tuple[tuple[int, int], ...] = ()
    max_tokens: int = MAX_TOKENS

    def config(self) -> Config:
        """What a coordinator of such a run reads."""
        config = Config()
        config.cluster.kind = ClusterKind.slurm  # lost workers are replaced
        config.allocation.min_replicas = 1
        config.run.num_steps, config.evaluation.enabled = self.num_steps, False
        config.workflow.group_size, config.workflow.max_new_tokens = self.group_size, self.max_tokens
        config.engine.context_length = 1 + self.max_tokens
        config.engine.num_slots, config.rollout.concurrency = self.fleet.slots, self.concurrency
        config.staleness.eta, config.staleness.bound, config.staleness.target = self.eta, self.bound, self.target
        config.trainer.batch_groups, config.trainer.num_minibatches = self.batch_groups, 1
        return config


class Prompts:
    """Endless prompts, none held out."""

    def train(self, index: int) -> Prompt:
        """Prompt `index`."""
        return Prompt(f"t{index}", "question", "numeric", "1")

    def heldout(self) -> list[Prompt]:
        """None."""
        return []


class Simulation:
    """One run. `step_ends`, `concurrency`: when each step was finished, and the limit after it; `records`, `token_ages`: of the steps that count."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.now = setting, 0.0
        self.core = Coordinator(setting.config(), Prompts(), EPOCH, self.now)
        self.engines: dict[bytes, Engine] = {}
        self.records: list[StepRecord] = []
        self.token_ages: Counter[int] = Counter()
        self.step_ends: list[float] = []
        self.metrics: dict[str, float] = {}
        self.concurrency: list[int] = []
        self.wait_s, self.engine_s, self.idle_s, self.slot_s, self.lost_tokens = 0.0, 0.0, 0.0, 0.0, 0.0
        self._faults = Faults(setting.fleet, setting.seed)
        self._draw = np.random.default_rng(setting.seed)
        self._asking, self._batches, self._done_at = Prefetch(), dict[int, Batch](), math.inf
        self._names = itertools.count()
        self._ends: Ranking[bytes] = Ranking()
        self._step = 0

    def run(self) -> Simulation:
        """Play it to its end."""
        self._come(self.setting.fleet.num_engines)
        self._say(TRAINER, Register(Role.trainer, "node", 1))
        self._publish()
        self._ask(self._asking.want(0, 0))
        while self._step < self.setting.num_steps:
            peer = self._ends.first()
            engine = self.engines[peer] if peer is not None else None
            self._to(min(math.inf if engine is None else engine.next_end, self._done_at, self._faults.at))
            if self.now == self._done_at:
                self._end_step()
            elif self.now == self._faults.at:
                (self._come if self._faults.take(self.now, len(self.engines)) > 0 else self._go)(1)
            elif engine is not None:
                self._end_sample(engine)
        self._settle(-1)
        return self

    @property
    def counts(self) -> bool:
        """Whether what happens now counts."""
        return self._step >= self.setting.warm_up

    def _to(self, now: float) -> None:
        assert now < math.inf, "nothing can happen any more"
        if self.counts:
            self.wait_s += (now - self.now) * (self._done_at == math.inf)
            self.engine_s += (now - self.now) * len(self.engines)
        self.now = now

    def _settle(self, sign: int) -> None:
        """What engines have not used of their time, and their slots, is counted from now on (+1), or until now (-1)."""
        for engine in self.engines.values():
            engine.advance(self.now)
            self.idle_s -= sign * engine.idle_s
            self.slot_s -= sign * engine.slot_s

    def _rank(self, engine: Engine) -> None:
        if engine.next_end < math.inf:
            self._ends.put(engine.peer, (engine.next_end, engine.peer))
        else:
            self._ends.drop(engine.peer)

    def _end_sample(self, engine: Engine) -> None:
        engine.advance(self.now)
        work = engine.end_sample()
        self._rank(engine)
        if work is not None:
            self._say(engine.peer, GroupFinished(engine.group(work)))
        if engine.num_live < engine.told - engine.fleet.slots // NEWS:
            self._beat(engine)

    # -- messages

    def _say(self, peer: bytes, message: Message) -> None:
        self.core.handle(peer, message, self.now)
        while self.core.outbox:
            sending, self.core.outbox = self.core.outbox, []
            for receiver, answer in sending:
                self._receive(receiver, answer)

    def _receive(self, peer: bytes | None, message: Message) -> None:
        match message:
            case VersionAnnounced():
                for engine in self.engines.values():
                    self._load(engine, message.announcement.version.step)
            case Leases() if peer in self.engines:
                for lease in message.leases:
                    lengths = np.clip(drawn(self.setting.lengths)(self._draw, self.setting.group_size), 1, self.setting.max_tokens)
                    self.engines[peer].advance(self.now)
                    self.engines[peer].start(Work(lease, [int(length) for length in lengths]))
                    self._rank(self.engines[peer])
            case Batch():
                self._batches[message.step] = message
                self._train()

    # -- engines

    def _come(self, number: int) -> None:
        for _ in range(number):
            peer = f"engine {next(self._names)}".encode()
            self.engines[peer] = Engine(peer, self.setting.fleet, self.now)
            self._say(peer, Register(Role.rollout, "node", 2))
            if self.core.training.announcement is not None:
                self._load(self.engines[peer], self._step)

    def _go(self, number: int) -> None:
        for peer in list(self.engines)[:number]:
            engine = self.engines.pop(peer)
            engine.advance(self.now)
            self.lost_tokens += self.counts * engine.begun
            self.idle_s, self.slot_s = self.idle_s + self.counts * engine.idle_s, self.slot_s + self.counts * engine.slot_s
            self._ends.drop(peer)
            self.core.lost(self.core.registry.workers[peer], "its node lost power")

    def _load(self, engine: Engine, step: int) -> None:
        engine.advance(self.now)
        engine.load(step)
        self._rank(engine)
        self._beat(engine)

    def _beat(self, engine: Engine) -> None:
        leases = [HeldLease(work.lease.group_id, work.lease.attempt, work.lease.purpose, work.lease.version) for work in engine.works.values()]
        engine.told = engine.num_live
        self._say(engine.peer, Heartbeat(held=Version(EPOCH, self._step), capacity=engine.capacity, live=engine.num_live, leases=leases,
                                         leases_seen=1 << 40))

    # -- the trainer

    def _ask(self, steps: list[int]) -> None:
        for step in steps:
            self._say(TRAINER, BatchRequest(step))

    def _publish(self) -> None:
        self._say(TRAINER, StepFinished(Announcement(Version(EPOCH, self._step), "/weights", "digest"), self.metrics))
        self._ask(self._asking.announced(self._step))

    def _train(self) -> None:
        """Begin the present step if its batch is there, and nothing else is in training."""
        batch = self._batches.get(self._step)
        if batch is None or self._done_at < math.inf:
            return
        if self.counts:
            ages = np.concatenate([self._step - token_steps(group) for group in batch.groups])
            self.token_ages.update(ages.tolist())
        num_tokens = sum(int(group.lengths.sum()) for group in batch.groups)
        self._done_at = self.now + num_tokens / self.setting.fleet.trained_rate
        if self._step + 1 < self.setting.num_steps:
            self._ask(self._asking.want(self._step + 1, self._step))

    def _end_step(self) -> None:
        counts = self.counts
        del self._batches[self._step]
        self._step, self._done_at = self._step + 1, math.inf
        self.step_ends.append(self.now)
        if self._step == self.setting.warm_up:
            self._settle(1)
        for at, number in self.setting.changes:
            if at == self._step:
                (self._come if number > 0 else self._go)(abs(number))
        self._publish()
        records, self.core.training.records = self.core.training.records, []
        self.records += [record for record in records if counts and isinstance(record, StepRecord)]
        self.concurrency.append(self.core.concurrency.limit)
        self._train()
        if self._done_at == math.inf and self._step < self.setting.num_steps:
            self._ask(self._asking.want(self._step, self._step))

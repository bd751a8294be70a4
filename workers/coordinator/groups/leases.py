"""Hands out leases: training groups as far as staleness and concurrency allow, and evaluation prompts in turn with them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from workers.config import Config
from workers.coordinator.groups.concurrency import Concurrency
from workers.coordinator.groups.consumption import Totals
from workers.coordinator.groups.heldout_evaluation import Evaluation
from workers.coordinator.groups.lead import HeldBack
from workers.coordinator.groups.lease_routing import Room, Rooms, room_of
from workers.coordinator.groups.ledger import Ledger
from workers.coordinator.groups.staleness import StalenessPolicy
from workers.coordinator.registered_worker import Worker
from workers.coordinator.worker_registry import Registry
from workers.messages.from_coordinator import Leases
from workers.messages.parts import Lease, Purpose, Version

DRIFT = 1.1
"""By so much the mean length of answers, and the room of all workers, may differ from what is reckoned with."""


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
                 registry: Registry, policy: StalenessPolicy, totals: Totals, concurrency: Concurrency) -> None:
        self.config, self.prompts, self.heldout, self.ledger = config, prompts, heldout, ledger
        self.evaluation, self.registry, self.policy, self.totals, self.concurrency = evaluation, registry, policy, totals, concurrency
        self._sizes = {Purpose.evaluation: config.evaluation.num_samples, Purpose.training: config.workflow.group_size}
        self.rooms, self.held_back = Rooms(config.workflow.group_size, self._sizes.values()), HeldBack()
        self._tokens = self._num_groups = 1.0
        self._leased = {Purpose.evaluation: 0, Purpose.training: 0}  # samples, since the evaluation began

    def may_train(self, step: int) -> bool:
        """Whether another training group may start at `step`; a parked one has been admitted already."""
        room = len(self.ledger.running) < self.concurrency.limit
        return room and (bool(self.ledger.parked) or self.policy.may_admit(self.ledger.admitted, step))

    def watch(self, granted: Iterable[tuple[bytes, Leases]], step: int, now: float, trainer_waits: bool) -> None:
        """Have the concurrency see what was granted, what runs now, and whether the trainer waits for that; and how much is held back at `step`."""
        for _, leases in granted:
            for lease in leases.leases:
                if lease.purpose is Purpose.training:
                    self.concurrency.began(lease.group_id, now, lease.partial is None)
        self._look()
        held_out = len(self.evaluation.running) * self._sizes[Purpose.evaluation] / self._sizes[Purpose.training]
        if not 1 / DRIFT < (self.rooms.num_groups or 1.0) / self._num_groups < DRIFT:
            self._num_groups = self.rooms.num_groups or 1.0
        self.concurrency.look(now, len(self.ledger.running), held_out, len(self.rooms.rooms) * self.config.num_servers, int(self._num_groups),
                              trainer_waits)
        self.held_back.look(now, self._held_back(step, held_out))

    def decide(self, now: float) -> None:
        """A training step is finished: move the limit on concurrency, and begin anew with what is held back."""
        self.concurrency.decide(now, self.ledger.running, len(self.ledger.finished))
        self.held_back.restart(now)

    def _held_back(self, step: int, held_out: float) -> float:
        """The share of the room for training groups that is empty because staleness admits no more at `step`. Where held-out prompts wait, they
        take what training leaves, and half of the room is for training."""
        if self.ledger.parked or self.policy.may_admit(self.ledger.admitted, step):
            return 0.0
        if not self.evaluation.has_work and self.rooms.least_busy(self._sizes[Purpose.training]) is None:
            return 0.0
        room = min(self.concurrency.limit, self.rooms.num_groups / 2 if self.evaluation.has_work else self.rooms.num_groups - held_out)
        return max(0.0, 1 - len(self.ledger.running) / room) if room > 0 else 0.0

    def assign(self, version: Version, training: bool) -> list[tuple[bytes, Leases]]:
        """Lease whatever can be leased now; `training`: whether training groups are still wanted."""
        if self._turn(version, training) is None:
            return []
        self._look()
        granted: dict[bytes, list[Lease]] = {}
        while (purpose := self._turn(version, training)) is not None:
            peer = self.rooms.least_busy(self._sizes[purpose])
            if peer is not None:
                self._leased[purpose] += self._sizes[purpose]
                granted.setdefault(peer, []).append(self._lease(peer, version, purpose))
                self._look()
            elif purpose is Purpose.training and self.evaluation.has_work:
                self.rooms.keep_for_group()  # else single prompts would take every sample that becomes free, and a group never find room
                training = False
            else:
                break
        self.rooms.let_go()
        return [(peer, Leases([lease])) for peer, leases in granted.items() for lease in leases]  # each may be long

    def _turn(self, version: Version, training: bool) -> Purpose | None:
        """Whose turn it is. The first evaluation goes first, as training cannot begin without it; any other one shares with training, sample
        for sample, so that neither holds back the other."""
        may_train = training and self.may_train(version.step)
        if not self.evaluation.has_work:
            self._leased = dict.fromkeys(self._leased, 0)
            return Purpose.training if may_train else None
        first = version.step == 0 and self.evaluation.step == 0
        if may_train and not first and self._leased[Purpose.training] < self._leased[Purpose.evaluation]:
            return Purpose.training
        return Purpose.evaluation

    def _look(self) -> None:
        """Learn what each worker can still take of whom something has changed; of all of them where answers have become of another length."""
        tokens = self._tokens_per_sample()
        if not 1 / DRIFT < tokens / self._tokens < DRIFT:
            self._tokens = tokens
            self.registry.changed.update(dict.fromkeys(self.rooms.rooms))
        for changed in (self.registry.changed, self.ledger.running.changed, self.evaluation.running.changed):
            while changed:
                peer, _ = changed.popitem()
                worker = self.registry.workers.get(peer)
                able = worker is not None and worker.ready and worker.capacity and not (worker.suspect and self.registry.has_others(worker))
                self.rooms.put(peer, self.room(worker) if worker is not None and able else None)

    def room(self, worker: Worker) -> Room:
        """What `worker` has room for, as reckoned anew from its leases."""
        return room_of(worker, self._leases(worker.peer), self._tokens, max(self._sizes.values()))

    def _leases(self, peer: bytes) -> Iterator[tuple[str, int, int]]:
        for purpose, table in ((Purpose.training, self.ledger.running), (Purpose.evaluation, self.evaluation.running)):
            for group_id, lease in table.of(peer).items():
                yield group_id, lease.attempt, self._sizes[purpose]

    def _tokens_per_sample(self) -> float:
        """How long a response is expected to be: as those so far."""
        num_generated = self.ledger.num_finished + self.ledger.num_rejected
        if not num_generated:
            return self.config.workflow.max_new_tokens / 2
        return max(1.0, self.totals.tokens_generated / (num_generated * self.config.workflow.group_size))

    def _lease(self, peer: bytes, version: Version, purpose: Purpose) -> Lease:
        partial = None
        if purpose is Purpose.evaluation:
            group_id, index, attempt = self.evaluation.lease(peer)
            prompt, variant = self.heldout[index], 0
        else:
            group_id, index, attempt, admitted_at, variant, partial = self.ledger.lease(
                peer, version.step, self.registry.has_others(self.registry.workers[peer]))
            prompt, version = self.prompts.train(index), Version(version.epoch, admitted_at)
        # By the number of failures, not by the attempt: a group that was lost with its worker is sampled again as it was.
        worker, lease = self.registry.workers[peer], (self.evaluation if purpose is Purpose.evaluation else self.ledger).running[group_id]
        worker.num_leases = lease.number = worker.num_leases + 1
        seed = (self.config.run.seed * 1_000_003 + index) * 64 + variant
        return Lease(group_id, attempt, purpose, version, prompt.id, prompt.text, prompt.verifier, prompt.reference, seed % 2**31, partial)

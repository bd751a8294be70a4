"""What happened when, as a trace: spans of leases, weights, steps and batches, from the inputs of a replay and what was decided on them. Pure.

    replaying.Step, one after the other --look--> Span, Count --trace_events--> Chrome's trace format, which Perfetto shows

One clock, the coordinator's: a span begins and ends when the coordinator decides or hears of it, and durations that workers have measured themselves
(generation, rewards, a training step) end when their message came. So no clock of another node is needed; what is off is the way of a message.

Tracks: the trainer (waits, trains, publishes), the coordinator (batches asked for and formed, evaluations), each rollout worker (leases, with
generation and rewards in them; versions fetched and loaded).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workers.coordinator.core import Coordinator
from workers.coordinator.recording.inputs import Absorbed, Arrived
from workers.coordinator.recording.replaying import Step
from workers.messages.from_coordinator import Batch, Leases, LoadGranted, VersionAnnounced
from workers.messages.from_worker import (
    BatchRequest,
    GroupFailed,
    GroupFinished,
    GroupParked,
    GroupRejected,
    Heartbeat,
    LoadRequest,
    StepFinished,
)
from workers.messages.parts import Lease, Message, Version

TRAINER, COORDINATOR, LEASES, WEIGHTS = "trainer", "coordinator", "leases", "weights"
MICRO = 1e6
HOW = {GroupFinished: "finished", GroupRejected: "rejected", GroupFailed: "failed", GroupParked: "given back"}

DURATIONS = {"publish beside": "publish_background_s", "publish": "publish_s", "train": "train_s", "wait for a batch": "wait_batch_s"}
"""The trainer's, the last first, and its metrics that tell them."""


class Span(NamedTuple):
    """From `begin` to `end`, seconds since 1970, on the lane `kind` of a worker, or of the trainer or coordinator. `parts` lie within it."""

    who: str
    kind: str
    name: str
    begin: float
    end: float
    args: dict[str, Any]
    parts: tuple[Span, ...] = ()


class Count(NamedTuple):
    """A figure from `at` on."""

    name: str
    at: float
    value: float


class Open(NamedTuple):
    """A lease that runs."""

    since: float
    who: str
    lease: Lease


@dataclass
class Tracer:
    """Looks at a replay's steps in their order; `spans` by their ends, `counts` by their times."""

    spans: list[Span] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    _leases: dict[str, Open] = field(default_factory=dict)
    _asked: dict[int, float] = field(default_factory=dict)
    _announced: dict[Version, float] = field(default_factory=dict)
    _wanted: dict[bytes, tuple[Version, float]] = field(default_factory=dict)
    _loading: dict[bytes, tuple[Version, float]] = field(default_factory=dict)
    _evaluation: tuple[int, float] | None = None
    _told: dict[str, float] = field(default_factory=dict)
    _epoch: int = 0

    def look(self, step: Step) -> None:
        """Take note of one input, and of what followed."""
        if step.outcome is None or step.given is None:
            if step.core.epoch != self._epoch or step.gap:
                self.end(step.wall)  # what another incarnation had begun came to nothing
            self._epoch = step.core.epoch
            return
        if isinstance(step.given, Arrived | Absorbed):
            self._came(step.given.peer if isinstance(step.given, Arrived) else None, step.given.message, step.wall, step.core)
        for peer, message in step.outcome.sent:
            self._sent(peer, message, step.wall, step.core)
        self._state(step.core, step.wall)

    def end(self, now: float) -> None:
        """Nothing follows: what is under way ends here."""
        for group_id, open_ in list(self._leases.items()):
            self._close(group_id, open_.lease.attempt, now, {"ended": "not known"})
        self._asked.clear()
        self._wanted.clear()
        self._loading.clear()
        self._evaluation = None

    def _came(self, peer: bytes | None, message: Message, now: float, core: Coordinator) -> None:
        match message:
            case GroupFinished():
                group = message.group
                self._close(group.group_id, group.attempt, now, {
                    "samples": group.lengths.size, "tokens": int(group.lengths.sum()), "versions": f"{group.steps.min()} to {group.steps.max()}",
                    "interruptions": group.num_interruptions, "reward": float(group.rewards.mean())}, group.generation_s, group.reward_s)
            case GroupParked():
                self._close(message.partial.group_id, message.partial.attempt, now, {"ended": HOW[GroupParked]})
            case GroupRejected() | GroupFailed():
                self._close(message.group_id, message.attempt, now, {"ended": HOW[type(message)]})
            case BatchRequest():
                self._asked.setdefault(message.step, now)
            case StepFinished():
                self._step(message, now)
            case LoadRequest() if peer is not None:
                name = _name(core, peer)
                if peer not in self._wanted and (since := self._announced.get(message.version)) is not None:
                    self.spans.append(Span(name, WEIGHTS, f"fetch {message.version}", since, now, {}))
                self._wanted[peer] = message.version, now
            case Heartbeat() if peer in self._loading and message.held is not None:
                version, since = self._loading[peer]
                if message.held >= version:
                    del self._loading[peer]
                    self.spans.append(Span(_name(core, peer), WEIGHTS, f"load {version}", since, now, {}))

    def _sent(self, peer: bytes | None, message: Message, now: float, core: Coordinator) -> None:
        match message:
            case Leases() if peer is not None:
                for lease in message.leases:
                    if (other := self._leases.get(lease.group_id)) is not None:
                        self._close(lease.group_id, other.lease.attempt, now, {"ended": "given to another"})
                    self._leases[lease.group_id] = Open(now, _name(core, peer), lease)
            case Batch() if (asked := self._asked.pop(message.step, None)) is not None:
                self.spans.append(Span(COORDINATOR, "batches", f"batch of step {message.step + 1}", asked, now, {"groups": len(message.groups)}))
            case LoadGranted() if peer in self._wanted:
                version, since = self._wanted.pop(peer)
                self.spans.append(Span(_name(core, peer), WEIGHTS, f"wait to load {version}", since, now, {}))
                self._loading[peer] = version, now
            case VersionAnnounced():
                self._announced.setdefault(message.announcement.version, now)

    def _close(self, group_id: str, attempt: int, now: float, args: dict[str, Any], generation_s: float = 0.0, reward_s: float = 0.0) -> None:
        begun = self._leases.get(group_id)
        if begun is None or begun.lease.attempt != attempt:
            return
        del self._leases[group_id]
        since, who, lease = begun
        args = {"ended": HOW[GroupFinished], "attempt": attempt, "admitted at": lease.version.step, **args}
        judged = max(since, now - reward_s)
        parts = [Span(who, LEASES, "generation", max(since, judged - generation_s), judged, {})] if generation_s else []
        parts += [Span(who, LEASES, "rewards", judged, now, {})] if reward_s else []
        self.spans.append(Span(who, LEASES, f"{lease.purpose.value} {group_id}", since, now, args, tuple(parts)))

    def _step(self, message: StepFinished, now: float) -> None:
        """The trainer's own durations, backwards from when the new version was announced."""
        metrics, step = message.metrics, message.announcement.version.step
        at = now
        for name, of in DURATIONS.items():
            if metrics.get(of, 0.0) > 0:
                lane = "publishing" if of == "publish_background_s" else "steps"
                args = {"version": str(message.announcement.version)} | {
                    key: metrics[key] for key in ("loss", "grad_norm", "gap_proximal_behavior") if of == "train_s" and key in metrics}
                self.spans.append(Span(TRAINER, lane, f"{name}, step {step}", at - metrics[of], at, args))
                at -= metrics[of]

    def _state(self, core: Coordinator, now: float) -> None:
        evaluation = core.evaluation
        if self._evaluation is not None and (not evaluation.active or evaluation.step != self._evaluation[0]):
            step, since = self._evaluation
            self.spans.append(Span(COORDINATOR, "evaluations", f"evaluation at step {step}", since, now, {}))
            self._evaluation = None
        if evaluation.active and self._evaluation is None:
            self._evaluation = evaluation.step, now
        for name, value in (("groups running", len(core.ledger.running)), ("groups in the buffer", len(core.ledger.finished)),
                            ("rollout workers ready", core.registry.num_ready), ("lead", round(core.policy.ahead(max(0, core.training.step)), 3))):
            if self._told.get(name) != value:
                self._told[name] = value
                self.counts.append(Count(name, now, value))


def _name(core: Coordinator, peer: bytes) -> str:
    worker = core.registry.workers.get(peer)
    return f"{worker.name} on {worker.host}" if worker is not None else f"a worker that has left ({peer.hex()[:6]})"


def trace_events(spans: Iterable[Span], counts: Iterable[Count]) -> Iterator[dict[str, Any]]:
    """Events of Chrome's trace format (times in microseconds from the first): each worker a process, spans that overlap on threads of their own."""
    spans, counts = sorted(spans, key=lambda span: span.begin), list(counts)
    zero = min([span.begin for span in spans] + [count.at for count in counts], default=0.0)
    by_lane: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_lane[span.who, span.kind].append(span)
    processes = {who: number for number, who in enumerate(sorted({span.who for span in spans}, key=_rank), 1)}
    threads: dict[str, int] = defaultdict(int)
    for who, number in processes.items():
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": who}}
    for (who, kind), own in by_lane.items():
        for place, lane in enumerate(lanes(own)):
            threads[who] += 1
            where = {"pid": processes[who], "tid": threads[who]}
            yield {"ph": "M", **where, "name": "thread_name", "args": {"name": f"{kind} {place + 1}" if place else kind}}
            for span in lane:
                for one in (span, *span.parts):
                    begin, end = (round((time - zero) * MICRO) for time in (one.begin, one.end))
                    yield {"ph": "X", **where, "cat": kind, "name": one.name, "ts": begin, "dur": end - begin, "args": one.args}
    for count in counts:
        yield {"ph": "C", "pid": 0, "name": count.name, "ts": round((count.at - zero) * MICRO), "args": {"value": count.value}}


def _rank(who: str) -> tuple[int, str]:
    return [COORDINATOR, TRAINER].index(who) if who in (COORDINATOR, TRAINER) else 2, who


def lanes(spans: list[Span]) -> list[list[Span]]:
    """Spans, in the order of their begins, on as few lanes as need be: on each they follow one another."""
    found: list[list[Span]] = []
    free: list[tuple[float, int]] = []  # when each lane is free again
    for span in spans:
        lane = heapq.heappop(free)[1] if free and free[0][0] <= span.begin else len(found)
        if lane == len(found):
            found.append([])
        found[lane].append(span)
        heapq.heappush(free, (span.end, lane))
    return found

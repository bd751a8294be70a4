"""What keeps a run on SLURM going: decisions only, no commands and no clock. supervisor.py asks `decide`, and acts.

    nothing of a role in the queue, run not over     Submit: a new array (elements were used up, or a later wave is due)
    ... but one of it was never answered by sbatch   nothing, for UNANSWERED_S: SLURM may queue it yet
    ... again and again without any progress         End: something fails before the run's own counting of crashes begins
    ... and a person has cancelled what was left     End: by whom (of inference or reward: Tell, and nothing is submitted)
    ... and training has had run.max_hours           End: used up
    elements failed twice on a node                  Exclude the node, unless that would leave too few
    inference or reward held by idle ones while
    training runs                                    Release (training releases them when it starts; one may be held just after)
    run over, elements still pending                 CancelPending
    an element ended by a fault                      Tell

Invariants, all tested: a training array is submitted only while no element of any earlier one is in the queue, nor while SLURM may
still queue one, so there are never two that live; nothing is submitted once the run is over or asked to stop; a node is excluded only
after two failures on it. A queue that could not be read is not an empty one: then there is no decision.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from launcher.monitoring.observation import Observation
from launcher.slurm.queries import HistoryEntry, QueueEntry
from launcher.slurm.states import Action, Meaning, State

SETTLE_S = 30.0
CUT_SHORT_S = 120.0
HELD_S = 60.0
FAST_S = 240.0
"""One that fails in the first 180 s stays for another 60 by default, so that a bad node does not use up the array (workers/slurm/element.py)."""
FAILURES = 2
FRUITLESS = 3
UNANSWERED_S = 300.0
HELD_BY_US = "requeued in held state"


@dataclass(frozen=True)
class Submit:
    """Submit a new array of this role."""

    role: str


@dataclass(frozen=True)
class Exclude:
    """Keep the role's elements off this node, now and later."""

    role: str
    node: str
    why: str


@dataclass(frozen=True)
class Release:
    """Release the role's held elements."""

    role: str


@dataclass(frozen=True)
class CancelPending:
    """Cancel what has not begun."""


@dataclass(frozen=True)
class End:
    """Record the end of the run: failed, or, `in_order`, drained where there is a checkpoint to go on from."""

    cause: str
    in_order: bool = False


@dataclass(frozen=True)
class Tell:
    """Say this to whoever watches."""

    text: str


Decision = Submit | Exclude | Release | CancelPending | End | Tell


@dataclass(frozen=True)
class Situation:
    """What `decide` goes by. `progress` grows with every epoch and every step; `num_nodes`: that each role may run on, 0 unknown;
    `cut_short_s`: how long ago jobs.json was last written, if the submission is not complete; `unanswered`: when the newest array of
    a role was submitted, of those without an answer from sbatch that the queue does not know either (or only since a moment ago)."""

    observed: Observation
    over: bool
    stop_requested: bool
    progress: tuple[int, int]
    training_hours: float
    num_nodes: dict[str, int]
    cut_short_s: float | None = None
    unanswered: dict[str, float] = field(default_factory=dict)


@dataclass
class SupervisorPolicy:
    """`nodes_needed`: of one element of each role that the run has; `excluded`: node -> when, by role, from earlier."""

    max_hours: float
    nodes_needed: dict[str, int]
    excluded: dict[str, dict[str, float]]
    _since: dict[str, float] = field(default_factory=dict)
    _submitted: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)
    _told: set[tuple[str, float]] | None = None
    _said: set[str] = field(default_factory=set)

    def decide(self, now: Situation) -> list[Decision]:
        """What is to be done now, in this order."""
        told = self._tell(now.observed)
        if now.over:
            pending = any(entry.state.waiting for entries in now.observed.queue.values() for entry in entries)
            return [*told, *([CancelPending()] if self._for(pending, "over", now, SETTLE_S) else [])]
        if now.cut_short_s is not None:
            late = now.cut_short_s > CUT_SHORT_S
            return [*told, *([End("the submission was cut short: its launcher died before all arrays were submitted")] if late else [])]
        return [*told, *self._exclude(now), *self._release(now), *self._submit(now)]

    def _for(self, condition: bool, name: str, now: Situation, seconds: float) -> bool:
        """True once `condition` has held for so long without a break."""
        if not condition:
            self._since.pop(name, None)
            return False
        return now.observed.time - self._since.setdefault(name, now.observed.time) >= seconds

    def _submit(self, now: Situation) -> list[Decision]:
        leading = self._leading
        train = now.observed.queue[leading]
        if now.stop_requested:
            gone = self._for(not any(now.observed.queue.values()), "stop", now, SETTLE_S)
            return [End("stopped: on request, when nothing of the run was left", in_order=True)] if gone else []
        # A run that is complete records that before its last element leaves the queue, but shared file systems show it later.
        if self._for(not train and self._answered(leading, now), f"no {leading}", now, SETTLE_S):
            if who := now.observed.cancelled.get(leading):
                return [End(f"stopped: {'training' if leading == 'train' else 'the evaluation'} was cancelled by {who} (scancel)", in_order=True)]
            if now.training_hours >= self.max_hours:
                return [End(f"run.max_hours={self.max_hours:g} is used up, and a larger one is needed to go on", in_order=True)]
            return self._again(leading, now)
        # Without training there is nothing to do for the others: their elements would only hold GPUs.
        trains = any(entry.state is State.RUNNING for entry in train)
        decisions: list[Decision] = []
        for role in self._serving:
            none = not now.observed.queue[role] and self._answered(role, now) and trains
            if self._for(none, f"no {role}", now, SETTLE_S):
                who = now.observed.cancelled.get(role)
                decisions += self._again(role, now) if who is None else self._cancelled(role, who)
        return decisions

    def _cancelled(self, role: str, who: str) -> list[Decision]:
        """What a person has cancelled is not submitted again: the run waits, and ends after run.stall_minutes."""
        said = f"all of {role} was cancelled by {who} (scancel): none is submitted again. To have it back: headway stop, then headway resume"
        told, self._said = said in self._said, self._said | {said}
        return [] if told else [Tell(said)]

    @property
    def _serving(self) -> list[str]:
        """The roles whose elements work for training."""
        return [role for role in self.nodes_needed if role != self._leading]

    @property
    def _leading(self) -> str:
        """The role that the run is there for: training, or inference where nothing is trained."""
        return "train" if "train" in self.nodes_needed else "inference"

    @staticmethod
    def _answered(role: str, now: Situation) -> bool:
        return role not in now.unanswered or now.observed.time - now.unanswered[role] >= UNANSWERED_S

    def _again(self, role: str, now: Situation) -> list[Decision]:
        progress, times = self._submitted.get(role, (None, 0))
        times = times + 1 if progress == now.progress else 0
        if times >= FRUITLESS:
            return [End(f"{times} {role} arrays in a row have ended without any progress: {self._last_end(now.observed.history[role])}")]
        self._submitted[role] = (now.progress, times)
        self._since.pop(f"no {role}", None)
        return [Submit(role)]

    @staticmethod
    def _last_end(history: list[HistoryEntry]) -> str:
        faults = [entry for entry in history if entry.state.meaning is Meaning.fault]
        if not faults:
            return "see the logs in jobs/"
        return f"{faults[-1].element} {faults[-1].state.words}; see the logs in jobs/"

    def not_submitted(self, role: str) -> None:
        """A `Submit` could not be carried out: that says nothing about progress. It is decided again after a while."""
        self._submitted.pop(role, None)

    def _release(self, now: Situation) -> list[Decision]:
        trains = any(entry.state is State.RUNNING for entry in now.observed.queue[self._leading])
        decisions: list[Decision] = []
        for role in self._serving:
            if self._for(trains and any(map(held_by_us, now.observed.queue[role])), f"held {role}", now, HELD_S):
                self._since.pop(f"held {role}")
                decisions.append(Release(role))
        return decisions

    def _exclude(self, now: Situation) -> list[Decision]:
        decisions: list[Decision] = []
        for role, history in now.observed.history.items():
            excluded = self.excluded.setdefault(role, {})
            blamed = [entry for entry in history if blames_node(entry)]
            counts = Counter(node for entry in blamed for node in entry.nodes)
            for node, count in sorted(counts.items()):
                again = any(node in entry.nodes and (entry.start or 0.0) > excluded.get(node, 0.0) for entry in blamed)
                num_nodes = now.num_nodes.get(role, 0)
                left = num_nodes - len(excluded.keys() | {node})
                if count >= FAILURES and again and left >= max(self.nodes_needed[role], num_nodes / 2):
                    excluded[node] = now.observed.time
                    decisions.append(Exclude(role, node, f"{count} {role} elements failed on it"))
        return decisions

    def _tell(self, observed: Observation) -> list[Decision]:
        faults = {(entry.element, entry.start or 0.0): entry for entries in observed.history.values() for entry in entries
                  if entry.state.meaning is Meaning.fault}
        alike: dict[tuple, list[str]] = {}
        for key, entry in faults.items():
            if self._told is not None and key not in self._told:
                alike.setdefault((entry.nodes, entry.state, entry.exit_code), []).append(entry.element)
        self._told = set(faults)
        return [Tell(f"{'job' if len(elements) == 1 else f'{len(elements)} jobs, the last of them'} {elements[-1]} on {','.join(nodes)} {state.words}"
                     + (f" (exit status {code})" if code else "")) for (nodes, state, code), elements in alike.items()]


def blames_node(entry: HistoryEntry) -> bool:
    """The failure speaks against the node: SLURM says so, or the element failed soon after it began."""
    return entry.state.action is Action.blame_node or (entry.state is State.FAILED and entry.elapsed_s < FAST_S)


def held_by_us(entry: QueueEntry) -> bool:
    """The element put itself back into the queue, held, and held its role's arrays; what users and administrators hold stays so."""
    return entry.held and (HELD_BY_US in entry.reason.lower() or (entry.state is State.REQUEUE_HOLD and not entry.reason))


def pending_arrays(entries: list[QueueEntry]) -> list[str]:
    """Arrays with elements that wait."""
    return sorted({entry.array_job_id for entry in entries if entry.state.waiting}, key=int)

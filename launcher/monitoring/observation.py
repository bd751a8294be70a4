"""What SLURM and the run folder say of a run on SLURM, at one moment; and the same in figures, for `status --json` and the view."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from launcher.jobs.liveness import ROLES, job_ids, submitted_roles
from launcher.slurm import queries
from launcher.slurm.accounting import NewestCheckpoint, account, describe, gpus_per_element, last_sign, newest_checkpoint, training_hours
from launcher.slurm.queries import HistoryEntry, QueueEntry
from launcher.slurm.states import Meaning
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.run.incarnations import Incarnation
from workers.slurm.command import SlurmError

HISTORY_S = 60.0
SOON_S = 10.0
NUM_LIVES = 5


@dataclass(frozen=True)
class Observation:
    """The elements of a run by role: in the queue, and ended. `no_history`: why accounting says nothing; `seen`: when training was last
    seen to be alive, None if not known; `gpus` that an element of each array asked for, by the array's id; `roles` that the run has; `cancelled`:
    the person who has cancelled what ended last of a role, by role."""

    time: float
    queue: dict[str, list[QueueEntry]]
    history: dict[str, list[HistoryEntry]]
    no_history: str
    lives: list[Incarnation]
    checkpoint: NewestCheckpoint | None
    seen: float | None = None
    gpus: dict[str, int] = field(default_factory=dict)
    roles: tuple[str, ...] = ("inference", "train")
    cancelled: dict[str, str] = field(default_factory=dict)

    @property
    def training_hours(self) -> float:
        """Wall time that training has had; of an evaluation, which has none, the time that its first elements have had."""
        if "train" not in self.roles:
            return self._element_hours
        running = {entry.element for entry in self.queue["train"] if not entry.state.waiting}
        return training_hours(self.lives, self.time, self.history["train"], running, self.seen)


    @property
    def _element_hours(self) -> float:
        """Hours in which any inference element ran, as accounting has it."""
        spans = sorted((entry.start, min(self.time, entry.start + entry.elapsed_s)) for entry in self.history["inference"] if entry.start is not None)
        total, covered = 0.0, 0.0
        for start, end in spans:
            total += max(0.0, end - max(start, covered))
            covered = max(covered, end)
        return total / 3600


class Observer:
    """Looks at a run again and again; asks accounting, which costs more and changes less, once a minute, or soon after an element has gone."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._history: dict[str, list[HistoryEntry]] = {role: [] for role in ROLES}
        self._no_history = ""
        self._cancelled: dict[str, str] = {}
        self._asked = -HISTORY_S
        self._there: set[str] = set()
        self._changed = False

    def look(self, now: float) -> Observation:
        """Everything as it is `now` (seconds since 1970). Raises `SlurmError` where the queue cannot be read."""
        ids = job_ids(self.run)
        everything = [job_id for role in ROLES for job_id in ids[role]]
        entries = queries.squeue(everything)
        there = {entry.job_id for entry in entries}
        self._changed |= not self._there <= there
        self._there = there
        if now - self._asked >= (SOON_S if self._changed else HISTORY_S):
            self._asked, self._no_history, self._changed = now, "", False
            try:
                past = queries.history(everything)
                self._history = {role: [entry for entry in past if entry.array_job_id in ids[role] and entry.nodes] for role in ROLES}
                self._cancelled = {role: who for role in ROLES if (who := cancelled_by(
                    [one for one in past if one.array_job_id in self.run.arrays(role)], self.run.resumed_at()))}
            except SlurmError as error:
                self._no_history = str(error)
        queue = {role: [entry for entry in entries if entry.array_job_id in ids[role]] for role in ROLES}
        checkpoint = newest_checkpoint(self.run)
        return Observation(now, queue, self._history, self._no_history, incarnations.history(self.run), checkpoint, last_sign(self.run, checkpoint),
                     gpus_per_element(self.run), submitted_roles(self.run), self._cancelled)


def cancelled_by(history: list[HistoryEntry], since: float) -> str:
    """The person who has cancelled what has ended last, '' where nobody has, or not `since` (seconds since 1970)."""
    ended = [entry for entry in history if entry.end is not None and entry.end > since]
    last = max((entry.end or 0.0 for entry in ended), default=0.0)
    return next((entry.cancelled_by for entry in ended if entry.end == last and entry.cancelled_by), "")


def figures(observed: Observation, rollout_idle_s: float) -> dict:
    """What was observed as JSON-ready figures: 'roles', 'hours', 'lives' (the newest), 'checkpoint', 'no_accounting'."""
    hours = account(observed.lives, observed.history, observed.checkpoint, rollout_idle_s, observed.gpus)
    saved = observed.checkpoint
    return {
        "roles": {role: _role(observed, role) for role in observed.roles},
        "hours": None if observed.no_history else dataclasses.asdict(hours),
        "lives": [msgspec.to_builtins(life) | {"words": describe(life)} for life in observed.lives[-NUM_LIVES:]],
        "checkpoint": None if saved is None else {"step": saved.step, "age_s": round(observed.time - saved.time, 1)},
        "no_accounting": observed.no_history,
    }


def _role(observed: Observation, role: str) -> dict:
    queue = observed.queue[role]
    with_nodes = [entry for entry in queue if not entry.state.waiting]
    waiting = [entry for entry in queue if entry.state.waiting]
    last = {entry.element: entry.state for entry in observed.history[role]}  # of several incarnations, the newest stands last
    there = {entry.element for entry in queue}
    meanings = Counter(state.meaning for element, state in last.items() if element not in there)
    starts = [entry.start for entry in waiting if entry.start is not None and entry.start > observed.time]
    return {
        "running": [{"element": entry.element, "state": entry.state.name, "nodes": list(entry.nodes), "time_left_s": entry.time_left_s}
                    for entry in with_nodes],
        "says": list(dict.fromkeys(entry.comment for entry in queue if entry.comment)),
        "pending": len(waiting),
        "reasons": dict(Counter(entry.reason or "None" for entry in waiting)),
        "next": min((entry.element for entry in waiting), key=_number, default=""),
        "starts": min(starts, default=None),
        "done": None if observed.no_history else meanings[Meaning.in_order],
        "failed": None if observed.no_history else meanings[Meaning.fault],
    }


def _number(element: str) -> tuple[int, ...]:
    return tuple(int(part) for part in element.split("_"))

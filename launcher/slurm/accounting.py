"""What a run has done and used so far, from its folder and from SLURM's accounting. Pure, but for reading the run folder.

GPU-hours used: elapsed time * GPUs, over every incarnation of every element (a requeued element has several). Where accounting has
no GPUs on record, an element has those that were asked for at submission (jobs.json); where none were, it counts as one.

GPU-hours wasted, of those: training that had to be done again, and inference without work.
- A training incarnation that ended by a fault loses what came after its last checkpoint. With the steps on record (epochs/*.end)
  that is (last step - checkpoint) / (last step - first step) of its time, or all of it if it made no step. One that was killed without
  a word loses its time since the newest checkpoint if that one is its own, else all of its time if the next incarnation
  started at the same step, else nothing that we know of.
- Inference: the time that rollout workers report to have been without any lease (`IdleTime`), times the GPUs of an element.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from launcher.slurm.queries import HistoryEntry
from workers.run.checkpoints import MANIFEST, all_checkpoints
from workers.run.folder import RunFolder
from workers.run.incarnations import IN_ORDER, Incarnation

SAVED = tuple(how for how in IN_ORDER if how != "fenced")
"""Ends of incarnations that had saved what they had done."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """Which incarnation saved which step, when (seconds since 1970)."""

    epoch: int
    step: int
    time: float


@dataclass(frozen=True)
class Hours:
    """GPU-hours; `unit` is 'element-hours' where no GPUs are allocated."""

    used: float
    wasted: float
    train: float
    inference: float
    unit: str


class IdleTime:
    """How long rollout workers have been without any lease: by how much their total, rollout_idle_s, grew. Where another incarnation begins it lacks
    what workers had counted that have left since, and falls: that is no growth."""

    def __init__(self) -> None:
        self.seconds, self._total = 0.0, 0.0

    def add(self, steps: Iterable[Mapping]) -> IdleTime:
        """The next lines of metrics.jsonl; those without a total say nothing."""
        for total in (step.get("rollout_idle_s") for step in steps):
            if isinstance(total, int | float):
                self.seconds += max(0.0, total - self._total)
                self._total = total
        return self


def newest_checkpoint(run: RunFolder) -> NewestCheckpoint | None:
    """The newest checkpoint with its manifest, or None; its files are not verified here."""
    for checkpoint in reversed(all_checkpoints(run)):
        with contextlib.suppress(FileNotFoundError, ValueError):
            manifest = json.loads((checkpoint.folder / MANIFEST).read_bytes())
            return NewestCheckpoint(checkpoint.version.epoch, checkpoint.version.step, manifest["time"])
    return None


def describe(life: Incarnation) -> str:
    """One line for people: 'epoch 3 (1234_2 on trn0): crashed at step 12, checkpoint 10: the engine ...'."""
    who = f"epoch {life.claim.epoch} ({life.claim.element or 'local'} on {life.claim.host})"
    if life.end is None:
        return f"{who}: started at step {life.claim.step}"
    saved = "no checkpoint" if life.end.checkpoint < 0 else f"checkpoint {life.end.checkpoint}"
    return f"{who}: {life.end.how} at step {life.end.step}, {saved}" + (f": {life.end.cause}" if life.end.cause else "")


def last_sign(run: RunFolder, checkpoint: NewestCheckpoint | None) -> float:
    """When training was last seen to be alive, seconds since 1970: by its newest checkpoint or by status.json; 0 if never."""
    times = [0.0 if checkpoint is None else checkpoint.time]
    with contextlib.suppress(FileNotFoundError):
        times.append(json.loads(run.status.read_bytes()).get("time", 0.0))
    return max(times)


def training_hours(lives: list[Incarnation], now: float, history: Sequence[HistoryEntry] = (), running: Collection[str] = (),
                   seen: float | None = None) -> float:
    """Wall time that training has had.

    A life without an end on record lasted until the next claim, until its element ended (`history`, of training), or until it was last
    `seen` (None: not known), unless its element is one of those `running`: whichever was first.
    """
    total = 0.0
    for life, following in itertools.zip_longest(lives, lives[1:]):
        total += max(0.0, (life.end.time if life.end else _latest_end(life, following, now, history, running, seen)) - life.claim.time)
    return total / 3600


def _latest_end(life: Incarnation, following: Incarnation | None, now: float, history: Sequence[HistoryEntry], running: Collection[str],
                seen: float | None) -> float:
    entry = _entry_of(life, history)
    bounds = [now, None if following is None else following.claim.time, None if entry is None else entry.end,
              None if life.claim.element in running else seen]
    return min(bound for bound in bounds if bound is not None)


def account(lives: list[Incarnation], history: dict[str, list[HistoryEntry]], checkpoint: NewestCheckpoint | None, rollout_idle_s: float,
            gpus: Mapping[str, int] | None = None) -> Hours:
    """GPU-hours as this file's head defines them; `history` by role, `gpus` that an element of each array asked for, by the array's id."""
    asked = gpus or {}

    def gpus_of(entry: HistoryEntry) -> int:
        return entry.num_gpus or asked.get(entry.array_job_id, 0)

    has_gpus = any(gpus_of(entry) for entries in history.values() for entry in entries)

    def devices(entry: HistoryEntry) -> int:
        return gpus_of(entry) if has_gpus else 1

    spent = {role: sum(entry.elapsed_s * devices(entry) for entry in entries) for role, entries in history.items()}
    wasted = 0.0
    for life, following in itertools.zip_longest(lives, lives[1:]):
        entry = _entry_of(life, history.get("train", []))
        if entry is not None:
            wasted += _lost_s(life, following, entry, checkpoint) * devices(entry)
    per_replica = max((devices(entry) for entry in history.get("inference", [])), default=0)
    wasted += min(rollout_idle_s * per_replica, spent.get("inference", 0.0))
    return Hours(sum(spent.values()) / 3600, wasted / 3600, spent.get("train", 0.0) / 3600, spent.get("inference", 0.0) / 3600,
                 "GPU-hours" if has_gpus else "element-hours")


def _entry_of(life: Incarnation, history: Sequence[HistoryEntry]) -> HistoryEntry | None:
    """Accounting's record of this incarnation: the last one of its element that began before it claimed its epoch."""
    begun = [entry for entry in history if entry.element == life.claim.element and entry.start is not None and entry.start <= life.claim.time + 1]
    return max(begun, key=lambda entry: entry.start or 0.0, default=None)


def _lost_s(life: Incarnation, following: Incarnation | None, entry: HistoryEntry, checkpoint: NewestCheckpoint | None) -> float:
    first = life.claim.step
    if life.end is not None:
        if life.end.how in SAVED:
            return 0.0
        steps, lost = life.end.step - first, life.end.step - max(life.end.checkpoint, first)
        return entry.elapsed_s * lost / steps if steps > 0 else entry.elapsed_s
    if following is None and not entry.state.over:  # it lives
        return 0.0
    if checkpoint is not None and checkpoint.epoch == life.claim.epoch and entry.end is not None:
        return max(0.0, entry.end - checkpoint.time)
    return entry.elapsed_s if following is not None and following.claim.step == first else 0.0


def gpus_per_element(run: RunFolder) -> dict[str, int]:
    """How many GPUs an element of each array asked for, by the array's id: for clusters whose accounting does not count GPUs."""
    return {array["job_id"]: array.get("gpus_per_element", 0) for array in run.submission().get("arrays", []) if array["job_id"]}

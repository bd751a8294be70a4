"""What a run has done and used so far, from its folder and from SLURM's accounting. Pure, but for reading the run folder.

GPU-hours used: elapsed time * GPUs, over every incarnation of every element (a requeued element has several). Where no GPUs are
allocated, an element counts as one.

GPU-hours wasted, of those: training that had to be done again, and inference without work.
- A training incarnation that ended by a fault loses what came after its last checkpoint. With the steps on record (epochs/*.end)
  that is (last step - checkpoint) / (last step - first step) of its time, or all of it if it made no step. One that was killed without
  a word loses its time since the newest checkpoint if that one is its own, else all of its time if the next incarnation
  started at the same step, else nothing that we know of.
- Inference: the time that rollout workers report to have been without any lease (rollout_idle_s), times the GPUs of an element.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass

from launcher.slurm import HistoryEntry
from workers.incarnations import Incarnation
from workers.rundir import RunFolder

SAVED = ("finished", "walltime", "preempted", "terminated", "stopped", "drained")


@dataclass(frozen=True)
class Checkpoint:
    """The newest checkpoint: which incarnation saved which step, when (seconds since 1970)."""

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


def newest_checkpoint(run: RunFolder) -> Checkpoint | None:
    """The newest complete checkpoint (checkpoints/EPOCH.STEP with its manifest), or None; its files are not verified here."""
    found = [tuple(map(int, entry.name.split("."))) for entry in run.checkpoints.glob("[0-9]*.[0-9]*")]
    for epoch, step in sorted(found, reverse=True):
        with contextlib.suppress(FileNotFoundError):
            manifest = json.loads((run.checkpoints / f"{epoch}.{step}" / "manifest.json").read_bytes())
            return Checkpoint(epoch, step, manifest["time"])
    return None


def describe(life: Incarnation) -> str:
    """One line for people: 'epoch 3 (1234_2 on trn0): crashed at step 12, checkpoint 10: the engine ...'."""
    who = f"epoch {life.claim.epoch} ({life.claim.element or 'local'} on {life.claim.host})"
    if life.end is None:
        return f"{who}: started at step {life.claim.step}"
    saved = "no checkpoint" if life.end.checkpoint < 0 else f"checkpoint {life.end.checkpoint}"
    return f"{who}: {life.end.how} at step {life.end.step}, {saved}" + (f": {life.end.cause}" if life.end.cause else "")


def training_hours(lives: list[Incarnation], now: float) -> float:
    """Wall time that training has had. A life without an end on record lasted at most until the next began."""
    ends = [life.claim.time for life in lives[1:]] + [now]
    return sum(max(0.0, (life.end.time if life.end else following) - life.claim.time) for life, following in zip(lives, ends, strict=False)) / 3600


def account(lives: list[Incarnation], history: dict[str, list[HistoryEntry]], checkpoint: Checkpoint | None, rollout_idle_s: float) -> Hours:
    """GPU-hours as this file's head defines them; `history` by role."""
    has_gpus = any(entry.num_gpus for entries in history.values() for entry in entries)

    def devices(entry: HistoryEntry) -> int:
        return entry.num_gpus if has_gpus else 1

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


def _entry_of(life: Incarnation, history: list[HistoryEntry]) -> HistoryEntry | None:
    """Accounting's record of this incarnation: the last one of its element that began before it claimed its epoch."""
    begun = [entry for entry in history if entry.element == life.claim.element and entry.start is not None and entry.start <= life.claim.time + 1]
    return max(begun, key=lambda entry: entry.start or 0.0, default=None)


def _lost_s(life: Incarnation, following: Incarnation | None, entry: HistoryEntry, checkpoint: Checkpoint | None) -> float:
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

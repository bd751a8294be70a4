"""Tells one tracker what a run writes, from its files: a process of its own, which the run neither waits for nor notices.

    python -m workers.tracking.run_follower RUN TRACKER [PARENT EPOCH]

    metrics.jsonl, evaluations.jsonl, heldout_samples.jsonl --lines.py: what is new--> tracker --its library--> server, or files
    outcome.json, summary.json ----------------------------------------------- finish

With PARENT, the training job of the incarnation EPOCH, it follows until that tells it to (`PARENT_DIED`), is gone, or is followed by another; then it
has `FINISH_S` seconds for the rest. By hand, without PARENT, it tells what was missed. One at a time follows for a tracker.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.config import Config, Tracker, TrackingConfig, load
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.run.processes import PARENT_DIED, end_with_parent, enlist, keep_logging
from workers.tracking.lines import NewLines
from workers.tracking.tracker import About, Tracked
from workers.transport import rendezvous

LOOK_S = 1.0
FINISH_S = 30
MODULES = {Tracker.wandb: ("wandb_run", "WandbRun"), Tracker.mlflow: ("mlflow_run", "MlflowRun"), Tracker.trackio: ("trackio_run", "TrackioRun"),
           Tracker.prometheus: ("prometheus_run", "PrometheusRun")}
PARTS = {"metrics.jsonl": "train", "evaluations.jsonl": "evaluation"}


class Follower:
    """Of `run` for the tracker `name`. `over`: set when nothing more comes; `epoch`: the incarnation whose lines these are, 0: whatever is there."""

    def __init__(self, run: RunFolder, config: Config, name: Tracker, over: threading.Event, epoch: int = 0) -> None:
        self._run, self._over, self._epoch = run, over, epoch
        self._lines = self._patiently(lambda: NewLines(run, name.value, anew=name is Tracker.prometheus))
        settings = flat(json.loads(self._patiently(run.config.read_bytes)))
        self._tracked: Tracked = open_tracker(name, config.tracking, About(config.run.name, run.path, settings, self._lines.place.remote))
        self._lines.place.remote = self._tracked.remote
        self._patiently(self._lines.save)

    def _patiently(self, work: Callable[[], Any]) -> Any:
        return patiently(self._run, work, hurry=self._over.is_set)

    def follow(self) -> None:
        """What is new, every second, until it is over; then the rest, and how the run has ended."""
        while not self._over.wait(LOOK_S) and self._ours():
            if self._patiently(self._is_cut):
                self.tell()
        if self._ours() and self._patiently(self._is_cut):
            self.tell()
        outcome = self._patiently(self._run.ended)
        over = bool(outcome) and outcome["state"] != "drained"  # else it goes on later
        self._tracked.finish(self._patiently(self._summary) if over else {}, over and outcome["state"] == "failed")

    def _ours(self) -> bool:
        return not self._epoch or self._patiently(self._run.newest_epoch) == self._epoch

    def _is_cut(self) -> bool:
        """Whether this incarnation has cut the files off behind its checkpoint: its coordinator can be found only after that."""
        if not self._epoch:
            return True
        found = rendezvous.newest(self._run)
        return found is not None and found.epoch >= self._epoch

    def _summary(self) -> dict[str, Any]:
        """The summary of the run's end, not of an earlier one that it was resumed after; else the outcome alone."""
        path = self._run.summary
        if path.exists() and path.stat().st_mtime > self._run.resumed_at():
            return flat(json.loads(path.read_bytes()))
        return dict(self._run.ended() or {})

    def tell(self) -> None:
        """What is new."""
        lines = self._lines.take()
        while (new := self._patiently(lambda: next(lines, None))) is not None:
            file, record = new
            step = int(record["step"])
            if file in PARTS:
                self._tracked.step(step, figures(record, PARTS[file]))
                if record.get("alarm_changes"):
                    self._tracked.alarm(step, "\n".join(record["alarm_changes"]))
            else:
                self._tracked.samples(step, record["samples"])


def open_tracker(tracker: Tracker, config: TrackingConfig, about: About) -> Tracked:
    """Open the run, again where it is known there. Raises what the library does."""
    module, kind = MODULES[tracker]
    return getattr(importlib.import_module(f"workers.tracking.{module}"), kind)(config, about)


def figures(record: Mapping[str, Any], part: str) -> dict[str, float]:
    """The numbers of a line, by names as trackers show them; what is not finite is left out."""
    return {f"{part}/{name}": value for name, value in flat(record).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)}


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested keys as one, with dots."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def listen(parent: int, over: threading.Event) -> None:
    """Have `over` set when the parent says so, or is gone; the process then has `FINISH_S` seconds, and ends by SIGALRM. What SLURM sends to every
    process of a job, and a terminal, is the parent's to hear."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def end(*_: object) -> None:
        over.set()
        signal.alarm(FINISH_S)

    signal.signal(PARENT_DIED, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [PARENT_DIED])
    end_with_parent(parent, PARENT_DIED)


def main(path: Path, name: str, parent: int = 0, epoch: int = 0) -> None:
    """Follow one run."""
    over = threading.Event()
    if parent:
        listen(parent, over)
    run = RunFolder.open(path)
    config = load(run.config)
    run = run.patient(config.run.outage_minutes)
    if parent:
        enlist(run)
    else:
        over.set()
    run.tracking.mkdir(mode=0o700, exist_ok=True)
    with (run.tracking / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of an incarnation before, which is finishing
        except OSError as error:  # Lustre without flock, NFS without lockd
            print(f"{run.path}: its file system has no locks ({error.strerror}), so that nothing keeps two of these apart", flush=True)
        Follower(run, config, Tracker(name), over, epoch).follow()


if __name__ == "__main__":
    os.umask(0o077)
    keep_logging()
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

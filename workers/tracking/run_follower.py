"""Tells one tracker what a run writes, from its files: a process of its own, which the run neither waits for nor notices.

    python -m workers.tracking.run_follower RUN TRACKER [PARENT]

    metrics.jsonl, evaluations.jsonl, heldout_samples.jsonl --lines.py: what is new--> tracker --its library--> server, or files
    outcome.json, summary.json ----------------------------------------------- finish

It follows until its run ends, or, with PARENT, until that tells it to (SIGTERM) or is gone; then it tells what is left. By hand, without PARENT, it
tells what was missed: after a run, or where the tracker could not be reached while it ran.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from workers.config import Tracker, TrackingConfig, load
from workers.run.folder import RunFolder
from workers.run.processes import end_with_parent, enlist
from workers.tracking.lines import NewLines
from workers.tracking.tracker import About, Tracked

LOOK_S = 1.0
PARTS = {"metrics.jsonl": "train", "evaluations.jsonl": "evaluation"}


class Follower:
    """Of `run`, for the tracker `name`. `over`: set when nothing more comes."""

    def __init__(self, run: RunFolder, name: Tracker, over: threading.Event) -> None:
        self._run, self._over = run, over
        config = load(run.config)
        self._lines = NewLines(run, name.value)
        self._tracked: Tracked = open_tracker(name, config.tracking, About(
            config.run.name, run.path, flat(json.loads(run.config.read_bytes())), self._lines.place.remote))
        self._lines.place.remote = self._tracked.remote
        self._lines.save()

    def follow(self) -> None:
        """Until it is over: what is new, every second; then the rest, and how the run has ended."""
        while not self._over.wait(LOOK_S) and self._run.ended() is None:
            self.tell()
        self.tell()
        outcome = self._run.ended() or {}
        summary = json.loads(self._run.summary.read_bytes()) if self._run.summary.exists() else {}
        self._tracked.finish(flat(summary) or dict(outcome), outcome.get("state") == "failed")

    def tell(self) -> None:
        """What is new."""
        for file, record in self._lines.take():
            step = int(record["step"])
            if file in PARTS:
                self._tracked.step(step, figures(record, PARTS[file]))
                for text in record.get("alarm_changes", ()):
                    self._tracked.alarm(step, text)
            else:
                self._tracked.samples(step, record["samples"])


def open_tracker(tracker: Tracker, config: TrackingConfig, about: About) -> Tracked:
    """Open the run, again where it is known there. Raises what the library does."""
    if tracker is Tracker.wandb:
        from workers.tracking.wandb_run import WandbRun
        return WandbRun(config, about)
    from workers.tracking.mlflow_run import MlflowRun
    return MlflowRun(config, about)


def figures(record: dict[str, Any], part: str) -> dict[str, float]:
    """The numbers of a line, by names as trackers show them; what is not finite is left out."""
    return {f"{part}/{name}": value for name, value in flat(record).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)}


def flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    """Nested keys as one, with dots."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{above}{name}.")
        else:
            found[f"{above}{name}"] = value
    return found


def main(path: Path, name: str, parent: int = 0) -> None:
    """Follow one run."""
    over = threading.Event()
    if parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # SLURM tells every process of a job
        signal.signal(signal.SIGTERM, lambda *_: over.set())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        end_with_parent(parent, signal.SIGTERM)
    run = RunFolder.open(path)
    if parent:
        enlist(run)
    else:
        over.set()
    Follower(run, Tracker(name), over).follow()


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)

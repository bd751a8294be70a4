"""`headway watch RUN`: follow a run in the terminal. Reads files of the run folder only, so it can come and go.

    status.json, metrics.jsonl, evaluations.jsonl, outcome.json --every half second--> live view, or lines if no terminal
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from launcher import view
from launcher.arguments import parse
from launcher.living import alive, submitted_jobs
from workers.files import read_lines
from workers.rundir import RunFolder

INTERVAL_S = 0.5
LOST_S = 5.0


class Follower:
    """Reads what is new in a run folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.steps: list[dict] = []
        self.evaluations: list[dict] = []
        self.status: dict | None = None
        self._offsets = {run.metrics: 0, run.evaluations: 0}

    def read(self) -> tuple[list[dict], list[dict]]:
        """Read on; returns the new steps and evaluations."""
        steps, evaluations = (self._lines(path) for path in (self.run.metrics, self.run.evaluations))
        self.steps += steps
        self.evaluations += evaluations
        if self.run.status.exists():
            self.status = json.loads(self.run.status.read_bytes())
        return steps, evaluations

    def _lines(self, path: Path) -> list[dict]:
        lines, self._offsets[path] = read_lines(path, self._offsets[path])
        return lines


def notice_dead_jobs(run: RunFolder, min_replicas: int, gone_since: dict[str, float]) -> None:
    """End the run if the training job, or too many inference jobs, have ended without anybody having said why, `LOST_S` seconds ago."""
    jobs, now = submitted_jobs(run), time.monotonic()
    dead = [job for job in jobs if alive(job) is None and now - gone_since.setdefault(job["job_id"], now) > LOST_S]
    inference = sum(job["name"].endswith("-inference") and job not in dead for job in jobs)
    fatal = [job for job in dead if job["name"].endswith("-train") or inference < min_replicas]
    if fatal and run.ended() is None:
        run.end(f"job {fatal[0]['name']} ({fatal[0]['job_id']}) has ended before the run was over; see {fatal[0]['log']}", "launcher")


def follow(run: RunFolder, name: str, console: Console, plain: bool, until: Callable[[], bool]) -> None:
    """Show the run until `until()` is true."""
    follower = Follower(run)
    live = None if plain else Live(console=console, refresh_per_second=4)
    if live is not None:
        live.start()
    try:
        waits = ""
        while True:
            over = until()
            steps, evaluations = follower.read()
            if live is None:
                waits = _print_lines(console, follower, steps, evaluations, waits)
            else:
                live.update(view.panel(name, follower.status, follower.steps, follower.evaluations, time.time(), run.ended()))
            if over:
                return
            time.sleep(INTERVAL_S)
    finally:
        if live is not None:
            live.stop()


def _print_lines(console: Console, follower: Follower, steps: list[dict], evaluations: list[dict], waits: str) -> str:
    """Print what is new; returns what was last said about waiting."""
    for record in sorted([*steps, *evaluations], key=lambda record: record["seconds"]):
        line = view.step_line(record) if "staleness_mean" in record else view.evaluation_line(record)
        console.print(line, soft_wrap=True)
    if follower.status is None or follower.steps:
        return waits
    now_waits = "; ".join(f"{part} waits for {what}" for part, what in follower.status["waiting"].items() if what)
    if now_waits and now_waits != waits:
        console.print(now_waits, soft_wrap=True)
    return now_waits or waits


def main(arguments: list[str] | None = None) -> int:
    """Command line; Ctrl-C stops watching, not the run."""
    run, plain = parse("watch", (__doc__ or "").splitlines()[0], arguments, ("--plain", "lines instead of the live view"))
    console = Console(markup=False, highlight=False)
    try:
        follow(run, run.path.name, console, plain or not console.is_terminal, lambda: run.ended() is not None)
    except KeyboardInterrupt:
        console.print(f"the run goes on; end it with: headway stop {run.path}")
        return 0
    outcome = run.ended()
    assert outcome is not None
    console.print(f"the run has ended: {outcome['cause'] or 'complete'}")
    return 0 if outcome["state"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())

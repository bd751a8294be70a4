"""`headway watch RUN`: follow a run in the terminal. Reads files of the run folder only, so it can come and go.

    status.json, metrics.jsonl, evaluations.jsonl, outcome.json --every half second--> live view, or lines if no terminal
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from launcher import view
from launcher.living import alive, submitted_jobs
from workers.rundir import RunFolder, RunFolderError

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
        if not path.exists():
            return []
        with path.open("rb") as file:
            file.seek(self._offsets[path])
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._offsets[path] += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


def notice_dead_jobs(run: RunFolder, gone_since: dict[str, float]) -> None:
    """End the run in the record if a job has ended without anybody having said why, `LOST_S` seconds ago."""
    if run.ended() is not None:
        return
    for job in submitted_jobs(run):
        if alive(job) is None:
            first = gone_since.setdefault(job["job_id"], time.monotonic())
            if time.monotonic() - first > LOST_S and run.ended() is None:
                run.end(f"job {job['name']} ({job['job_id']}) has ended before the run was over; see {job['log']}", "launcher")
                run.request_stop("a job has ended before the run was over")


def follow(run: RunFolder, name: str, console: Console, plain: bool, until: Callable[[], bool], supervise: bool) -> None:
    """Show the run until `until()` is true. `supervise`: also notice jobs that died without a word."""
    follower = Follower(run)
    gone_since: dict[str, float] = {}
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
            if supervise:
                notice_dead_jobs(run, gone_since)
            time.sleep(INTERVAL_S)
    finally:
        if live is not None:
            live.stop()


def _print_lines(console: Console, follower: Follower, steps: list[dict], evaluations: list[dict], waits: str) -> str:
    """Print what is new; returns what was last said about waiting."""
    for record in sorted([*steps, *evaluations], key=lambda record: record["seconds"]):
        line = view.step_line(record, follower.status) if "staleness_mean" in record else view.evaluation_line(record)
        console.print(line, highlight=False, soft_wrap=True)
    if follower.status is None or follower.steps:
        return waits
    now_waits = "; ".join(f"{part} waits for {what}" for part, what in follower.status["waiting"].items() if what)
    if now_waits and now_waits != waits:
        console.print(now_waits, highlight=False, soft_wrap=True)
    return now_waits or waits


def main(arguments: list[str] | None = None) -> int:
    """Command line; Ctrl-C stops watching, not the run."""
    parser = argparse.ArgumentParser(prog="headway watch", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    options = parser.parse_args(arguments)
    try:
        run = RunFolder.open(options.run)
    except RunFolderError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console()
    try:
        follow(run, run.path.name, console, options.plain or not console.is_terminal, lambda: run.ended() is not None, supervise=False)
    except KeyboardInterrupt:
        console.print(f"the run goes on; end it with: headway stop {run.path}")
        return 0
    outcome = run.ended()
    assert outcome is not None
    console.print(f"the run has ended: {outcome['cause'] or 'complete'}")
    return 0 if outcome["state"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())

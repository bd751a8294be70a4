"""`headway status RUN`: what every part of a run does and waits for, now. `--json` prints status.json as it is."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from rich.console import Console

from launcher import view
from launcher.living import alive, submitted_jobs
from launcher.watch import Follower
from workers.rundir import RunFolder, RunFolderError


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 while the run goes on or is complete, 1 if it failed, 2 if there is no such run."""
    parser = argparse.ArgumentParser(prog="headway status", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        run = RunFolder.open(options.run)
    except RunFolderError as error:
        print(error, file=sys.stderr)
        return 2
    follower = Follower(run)
    follower.read()
    outcome = run.ended()
    if options.json:
        print(json.dumps({"status": follower.status, "outcome": outcome}))
    else:
        console = Console(markup=False, highlight=False)
        console.print(view.panel(run.path.name, follower.status, follower.steps, follower.evaluations, time.time(), outcome))
        for job in submitted_jobs(run):
            state = "running" if alive(job) else "ended"
            console.print(f"job {job['job_id']}  {job['name']}  {state}  log {job['log']}", soft_wrap=True)
    return 1 if outcome is not None and outcome["state"] == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())

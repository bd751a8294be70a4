"""`headway status RUN`: what every part of a run does and waits for, now. `--json` prints status.json as it is."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console

from launcher import view
from launcher.arguments import parse
from launcher.living import alive, submitted_jobs
from launcher.watch import Follower


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 while the run goes on or is complete, 1 if it failed, 2 if there is no such run."""
    run, as_json = parse("status", __doc__ or "", arguments, ("--json", "for programs"))
    follower = Follower(run)
    follower.read()
    outcome = run.ended()
    if as_json:
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

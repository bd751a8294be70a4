"""`headway status RUN`: what every part of a run does and waits for, now. `--json` prints the same for programs."""

from __future__ import annotations

import json
import sys
import time

from rich.console import Console

from launcher.arguments import Parser, add_run, open_run
from launcher.jobs.liveness import alive, lost_here, no_room, on_slurm, submitted_jobs
from launcher.monitoring.observation import Observer, figures
from launcher.monitoring.watch import Follower
from launcher.views import evaluation_view, run_view
from launcher.views.terminal import terminal
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError


def _show_jobs(run: RunFolder, console: Console) -> None:
    """The jobs and where their logs are."""
    for job in submitted_jobs(run):
        console.print(f"job {job['job_id']}  {job['name']}  {'running' if alive(job) else 'ended'}  log {job['log']}", soft_wrap=True)
    for array in run.submission().get("arrays", []):
        console.print(f"array {array['job_id'] or '(being submitted)'}  {array['name']}  {array['num_elements']} elements, "
                      f"{array['throttle']} at a time  logs: headway logs {run.path} {array['role']}", soft_wrap=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 while the run goes on or is complete or drained, 1 if it failed or is lost, 2 if there is no such run."""
    parser = add_run(Parser(prog="headway status", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("--json", dest="as_json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    follower, now, lost = Follower(run), time.time(), lost_here(run)
    trouble = lost
    follower.read()
    if on_slurm(run):
        try:
            follower.slurm = figures(Observer(run).look(now), follower.idle.seconds)
        except SlurmError as error:
            trouble = f"SLURM cannot be asked: {error}"
    outcome = run.ended()
    if options.as_json:
        print(json.dumps({"status": follower.status, "outcome": outcome, "slurm": follower.slurm, "trouble": trouble}))
    else:
        console = terminal()
        console.print(run_view.panel(run.path.name, follower.status, follower.steps, follower.evaluations, now, outcome, follower.slurm))
        for line in evaluation_view.ending_lines(run) if outcome is not None else ():
            console.print(line, soft_wrap=True)
        for text in filter(None, (trouble, no_room(run))):
            console.print(text, style="bold red", soft_wrap=True)
        _show_jobs(run, console)
    return 1 if lost or (outcome is not None and outcome["state"] == "failed") else 0


if __name__ == "__main__":
    sys.exit(main())

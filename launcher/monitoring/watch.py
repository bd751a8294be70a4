"""`headway watch RUN`: follow a run in the terminal, and on SLURM keep it going. It can come and go: Ctrl-C leaves the run running.
Several people may watch; one of them keeps.

    status.json, metrics.jsonl, evaluations.jsonl, outcome.json --every half second--> live view, or lines if no terminal
    squeue, sacct, epochs/ --every few seconds--> the same view; supervisor.py --> new arrays, excluded nodes
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live

from launcher.arguments import Parser, add_run, open_run, refuse
from launcher.jobs.liveness import alive, lost_here, on_slurm, submitted_jobs
from launcher.monitoring.observation import Observation, Observer, figures
from launcher.monitoring.stop import told
from launcher.monitoring.supervisor import supervising
from launcher.report.ending import tell_report
from launcher.slurm.accounting import IdleTime
from launcher.views import evaluation_view, run_view
from launcher.views.terminal import terminal
from workers.config import RunConfig
from workers.run.files import GrowingLines
from workers.run.folder import RunFolder
from workers.run.outage import patiently
from workers.slurm.command import OtherCluster, SlurmError

INTERVAL_S = 0.5
LOOK_S = 5.0
LAST_LOOKS_S = 1.0
LOST_S = 5.0
EMPTY_S = 60.0


class Follower:
    """Reads what is new in a run folder."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self._steps, self._evaluations = GrowingLines(run.metrics), GrowingLines(run.evaluations)
        self.idle = IdleTime()
        self.status: dict | None = None
        self.slurm: dict | None = None

    @property
    def steps(self) -> list[dict]:
        """The newest lines of metrics.jsonl."""
        return self._steps.lines

    @property
    def evaluations(self) -> list[dict]:
        """The newest lines of evaluations.jsonl."""
        return self._evaluations.lines

    def read(self) -> tuple[list[dict], list[dict]]:
        """Read on; returns the new steps and evaluations."""
        steps, evaluations = self._steps.read(), self._evaluations.read()
        self.idle.add(steps)
        self.status = read_status(self.run) or self.status
        return steps, evaluations


def read_status(run: RunFolder) -> dict | None:
    """What the coordinator, or the elements of an evaluation, have last written; None before they have."""
    if run.evaluation.is_dir():
        return evaluation_view.progress(run)
    return json.loads(run.status.read_bytes()) if run.status.exists() else None


def notice_dead_jobs(run: RunFolder, min_replicas: int, gone_since: dict[str, float]) -> None:
    """End the run if the training job, too many inference jobs, or all that judge, have ended without anybody having said why, `LOST_S`
    seconds ago.

    When the last step is done, and when the run drains, inference leaves in order, while training may still have a model to export or a
    checkpoint to write."""
    jobs, now = submitted_jobs(run), time.monotonic()
    dead = [job for job in jobs if alive(job) is None and now - gone_since.setdefault(job["job_id"], now) > LOST_S]
    inference = sum(job["name"].endswith("-inference") and job not in dead for job in jobs)
    rewards = [job not in dead for job in jobs if job["name"].endswith("-reward")]
    lacking = inference < min_replicas or (rewards and not any(rewards))
    status = read_status(run) or {}
    in_order = status.get("complete") or status.get("suspended")
    fatal = [job for job in dead if job["name"].endswith("-train") or (lacking and not in_order)]
    if fatal and run.ended() is None:
        run.end(f"job {fatal[0]['name']} ({fatal[0]['job_id']}) has ended before the run was over; see {fatal[0]['log']}", "launcher")


def follow(run: RunFolder, name: str, console: Console, plain: bool, until: Callable[[], bool], follower: Follower | None = None) -> None:
    """Show the run until `until()` is true. While its folder is full or away that is said, and looked at again, for as long as the run itself
    waits. Raises `OutageTooLong`."""
    follower = follower or Follower(run)
    run = run.patient(json.loads(run.config.read_bytes()).get("run", {}).get("outage_minutes", RunConfig().outage_minutes))
    live = None if plain else Live(console=console, refresh_per_second=4)
    if live is not None:
        live.start()
    try:
        waits = ""
        while True:
            over = patiently(run, until, lambda text: console.print(text or "the run folder can be used again", soft_wrap=True))
            steps, evaluations = patiently(run, follower.read)
            if live is None:
                waits = _print_lines(console, follower, steps, evaluations, waits)
            else:
                live.update(run_view.panel(name, follower.status, follower.steps, follower.evaluations, time.time(), run.known_end(), follower.slurm))
            if over:
                return
            time.sleep(INTERVAL_S)
    finally:
        if live is not None:
            live.stop()


def _print_lines(console: Console, follower: Follower, steps: list[dict], evaluations: list[dict], waits: str) -> str:
    """Print what is new; returns what was last said about waiting."""
    for record in sorted([*steps, *evaluations], key=lambda record: record["seconds"]):
        line = run_view.evaluation_line(record) if "num_prompts" in record else run_view.step_line(record)
        console.print(line, soft_wrap=True)
        for change in record.get("alarm_changes", []):
            console.print(change, soft_wrap=True)
    absent = "" if follower.slurm is None or follower.run.ended() else run_view.absent(follower.status, follower.slurm, time.time())
    if not absent and (follower.status is None or follower.steps):
        return waits
    status = follower.status or {}
    now_waits = absent or "; ".join(f"{part} waits for {what}" for part, what in status["waiting"].items() if what)
    if not absent and evaluation_view.is_evaluation(status):
        now_waits = evaluation_view.tenths_line(status)
    if now_waits and now_waits != waits:
        console.print(now_waits, soft_wrap=True)
    return now_waits or waits


class Lookout:
    """On SLURM: looks at the queue every `LOOK_S` seconds, hands what it saw to the view and to the supervisor, and says when all is over."""

    def __init__(self, run: RunFolder, follower: Follower, act: Callable[[Observation], object], say: Callable[[str], None]) -> None:
        self.run, self.follower = run, follower
        self._act, self._say = act, say
        self._observer = Observer(run)
        self._next, self._trouble = 0.0, ""
        self._empty = False
        self._ended_at: float | None = None

    def over(self) -> bool:
        """True once the run has ended and nothing of it is left, or what is left has had its time."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (LOOK_S if self.run.ended() is None else LAST_LOOKS_S)
            self._look()
        if self.run.ended() is None:
            self._ended_at = None
            return False
        if self._ended_at is None:
            self._ended_at, self._next, self._empty = now, now, False  # look once more, now
            return False
        return self._empty or now - self._ended_at > EMPTY_S

    def _look(self) -> None:
        try:
            observed = self._observer.look(time.time())
            self.follower.slurm = figures(observed, self.follower.idle.seconds)
            self._empty = not any(observed.queue.values())
            self._act(observed)
            self._trouble = ""
        except OtherCluster:
            raise
        except SlurmError as error:  # the run does not need us: look again later
            if str(error) != self._trouble:
                self._say(f"SLURM cannot be asked: {error}")
            self._trouble = str(error)


def supervise_and_follow(run: RunFolder, console: Console, plain: bool) -> int:
    """Show a run on SLURM, and keep it going unless somebody else does, until it has ended; exit status 0 unless it failed."""
    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    follower = Follower(run)
    with supervising(run, say) as act:
        follow(run, run.path.name, console, plain, Lookout(run, follower, act, say).over, follower)
    status = _tell_end(run, console)
    if not run.evaluation.is_dir():
        tell_report(run, say)
    if (run.ended() or {}).get("state") == "finished" and run.summary.exists():
        for line in run_view.summary_lines(json.loads(run.summary.read_bytes())):
            say(line)
        for path in (run.final_model, run.summary):
            if path.exists():
                say(str(path))
    for line in evaluation_view.ending_lines(run):
        say(line)
    return status


def _over_here(run: RunFolder) -> Callable[[], bool]:
    """Whether a run on this machine has ended, or nothing of it has been left from one look to the next: a launcher has said why by then."""
    lost, looked = False, 0.0

    def over() -> bool:
        nonlocal lost, looked
        if run.ended() is not None:
            return True
        if (now := time.monotonic()) - looked < 2 * LOST_S:
            return False
        lost, before, looked = bool(lost_here(run)), lost, now
        return lost and before

    return over


def _tell_end(run: RunFolder, console: Console) -> int:
    outcome = run.ended()
    if outcome is None:
        console.print(lost_here(run), soft_wrap=True)
        return 1
    console.print(told(run, outcome) or f"the run has ended: {outcome['cause'] or 'complete'}", soft_wrap=True)
    if outcome["state"] == "drained":
        console.print(f"go on with: headway resume {run.path}", soft_wrap=True)
    return 1 if outcome["state"] == "failed" else 0


def main(arguments: list[str] | None = None) -> int:
    """Command line; Ctrl-C stops watching, not the run."""
    parser = add_run(Parser(prog="headway watch", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    console = terminal()
    plain = options.plain or not console.is_terminal
    try:
        if on_slurm(run):
            return supervise_and_follow(run, console, plain)
        follow(run, run.path.name, console, plain, _over_here(run))
        status = _tell_end(run, console)
        for line in evaluation_view.ending_lines(run):
            console.print(line, soft_wrap=True)
        return status
    except OtherCluster as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        console.print(f"the run goes on; end it with: headway stop {run.path}", soft_wrap=True)
        return 0


if __name__ == "__main__":
    sys.exit(main())

"""A run on this machine, from submission to its end: the launcher stays with it, and the run does not outlive the launcher."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console

from launcher.config.schema import FullConfig
from launcher.interrupts import Interrupted
from launcher.jobs.job_specs import JobSpec
from launcher.jobs.liveness import kill, still_there
from launcher.jobs.submit import submit
from launcher.monitoring.stop import stop, told
from launcher.monitoring.watch import follow, notice_dead_jobs
from launcher.report.ending import tell_report
from launcher.views import evaluation_view, run_view
from workers.run.files import is_full
from workers.run.folder import RunFolder

LINGER_S = 60.0


def start_here(run: RunFolder, config: FullConfig, specs: tuple[JobSpec, ...], console: Console) -> int:
    """Submit, and stay unless detached; returns the exit status. A signal or an error in here ends the run."""
    with attached(run, config.launch.detach):
        try:
            jobs = submit(specs, config, run)
            for job in jobs:
                console.print(f"job {job.job_id}  log {job.paths.stdout}", soft_wrap=True)
            console.print(f"run folder {run.path}", soft_wrap=True)
            if config.launch.detach:
                console.print(f"watch it: headway watch {run.path}\nend it:   headway stop {run.path}", soft_wrap=True)
                return 0
            stay(run, config, console, lambda: [job.done() for job in jobs])
        except OSError as error:
            if not is_full(error):
                raise
            console.print(f"{run.full_disk()}: {kill(run)} processes of the run were ended by force. Free some space", style="red", soft_wrap=True)
            return 1
        except Interrupted as error:
            console.print(f"\n{error.words}: ending the run; once more to end it by force")
            try:
                stop(run, f"by {error.words}")
            except Interrupted:
                console.print(stop(run, f"by {error.words}", patience_s=0))
            conclude(run, config, console, error.words)
            raise
        return conclude(run, config, console)


@contextmanager
def attached(run: RunFolder, detach: bool) -> Iterator[None]:
    """Hold the launcher's lock while attached. If this process dies, or leaves by an error, the kernel lets go of the lock while
    its file is still there, and the coordinator ends the run."""
    if detach:
        yield
        return
    descriptor = os.open(run.launcher_lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: then nobody can tell whether this process lives
        run.launcher_lock.unlink()
    try:
        yield
        run.launcher_lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def stay(run: RunFolder, config: FullConfig, console: Console, reap: Callable[[], object]) -> None:
    """Show the run until it has ended and all its processes are gone; what is left `LINGER_S` after that is killed.

    `reap` collects jobs that have ended: they are our children.
    """
    gone_since: dict[str, float] = {}
    ended_at: list[float] = []

    def over() -> bool:
        reap()
        if run.ended() is None:
            notice_dead_jobs(run, config.allocation.min_replicas, gone_since)
            return False
        ended_at.append(time.monotonic())
        if still_there(run) and ended_at[-1] - ended_at[0] > LINGER_S:
            console.print(f"{kill(run)} processes had not ended {LINGER_S:g} s after the run, and were killed")
        return not still_there(run)

    follow(run, config.run.name, console, config.launch.plain or not console.is_terminal, over)


def conclude(run: RunFolder, config: FullConfig, console: Console, ended_by: str = "") -> int:
    """Say how the run ended; exit status 0 if it is complete. `ended_by`: the signal that told this process to end it."""
    if not config.evaluates and not config.launch.selftest:
        tell_report(run, lambda line: console.print(line, soft_wrap=True))
    outcome = run.ended() or {"state": "failed", "cause": "nobody has recorded why"}
    for line in evaluation_view.ending_lines(run):
        console.print(line, soft_wrap=True)
    if stopped := told(run, outcome, ended_by):
        console.print(stopped, soft_wrap=True)
        return 1
    if outcome["state"] == "drained":
        console.print(f"drained: {outcome['cause']}; go on with: headway resume {run.path}", soft_wrap=True)
        return 0
    if outcome["state"] == "failed":
        console.print(f"the run failed: {outcome['cause']}", style="bold red", soft_wrap=True)
        console.print(f"logs: {run.jobs}", soft_wrap=True)
        return 1
    if run.summary.exists():
        for line in run_view.summary_lines(msgspec.json.decode(run.summary.read_bytes())):
            console.print(line, soft_wrap=True)
    if config.evaluates:
        return 0
    if config.trainer.export_final:
        console.print(f"trained model {run.final_model}", soft_wrap=True)
    console.print(f"summary {run.summary}", soft_wrap=True)
    return 0

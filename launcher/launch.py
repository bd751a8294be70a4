"""From a checked config to a running run: folder, preparation, submission, and then watching it or leaving it alone."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from launcher import view
from launcher.jobs import job_specs
from launcher.living import kill, living
from launcher.partition import Plan
from launcher.schema import FullConfig
from launcher.stop import stop
from launcher.submit import describe, submit
from launcher.watch import follow, notice_dead_jobs
from workers.config import ConfigError
from workers.files import write_atomic
from workers.rundir import RunFolder

ROOT = Path(__file__).resolve().parent.parent
LINGER_S = 60.0


class Interrupted(KeyboardInterrupt):
    """A signal told the launcher to end the run. Like KeyboardInterrupt it passes through Hydra, and ends a whole sweep."""


def new_run_path(config: FullConfig) -> Path:
    """`run.dir`, or a new name below runs/."""
    if config.run.dir:
        return Path(config.run.dir).expanduser().absolute()
    return Path("runs").absolute() / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def absolute(path: str) -> str:
    """A user's path, the same for every process wherever it runs."""
    return str(Path(path).expanduser().absolute()) if path else path


def prepare(run: RunFolder, config: FullConfig) -> None:
    """Write the config and have the run folder prepared. Raises `ConfigError` with what the preparation found wrong."""
    config.run.dir = str(run.path)
    config.data.path, config.data.heldout_path = absolute(config.data.path), absolute(config.data.heldout_path)
    if config.weights.dir not in ("auto", "run"):
        config.weights.dir = absolute(config.weights.dir)
    write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config.for_workers())))
    write_atomic(run.config_yaml, yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False).encode())
    result = subprocess.run([sys.executable, "-m", "workers.prepare", str(run.path)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                            text=True, check=False)
    if result.returncode:
        raise ConfigError(result.stderr.strip().splitlines()[-1] if result.returncode == 2 else f"preparation failed:\n{result.stderr}")


def launch(config: FullConfig) -> int:
    """Start a run, and unless detached stay with it to its end; returns the exit status. Raises `ConfigError`, `RunFolderError`,
    `Interrupted` where a signal ended it."""
    console = Console(markup=False, highlight=False)
    plan = config.plan()
    console.print(f"plan: {plan.describe()}")
    run = RunFolder(new_run_path(config))
    if config.launch.dry_run:
        for spec in job_specs(plan, config.run.name, run):
            console.print(describe(spec, config, run), soft_wrap=True)
        return 0
    RunFolder.create(run.path)
    with interruptible():
        try:
            # Jobs and the preparation find the packages wherever this command was started.
            os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
            prepare(run, config)
        except BaseException:
            shutil.rmtree(run.path)  # a run that never began: the corrected command can use the same folder
            raise
        with attached(run, config.launch.detach):
            return start(run, config, plan, console)


def start(run: RunFolder, config: FullConfig, plan: Plan, console: Console) -> int:
    """Submit, and stay unless detached. A signal or an error in here ends the run."""
    try:
        jobs = submit(job_specs(plan, config.run.name, run), config, run)
        for job in jobs:
            console.print(f"job {job.job_id}  log {job.paths.stdout}", soft_wrap=True)
        console.print(f"run folder {run.path}", soft_wrap=True)
        if config.launch.detach:
            console.print(f"watch it: headway watch {run.path}\nend it:   headway stop {run.path}", soft_wrap=True)
            return 0
        stay(run, config, console, lambda: [job.done() for job in jobs])
    except Interrupted as error:
        console.print(f"\n{error}: ending the run; once more to end it by force")
        try:
            console.print(stop(run, f"the launcher got {error}"))
        except Interrupted:
            console.print(stop(run, f"the launcher got {error}", patience_s=0))
        conclude(run, config, console)
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
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
        run.launcher_lock.unlink()
    finally:
        os.close(descriptor)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `Interrupted` inside."""
    def interrupt(number: int, _: object) -> None:
        raise Interrupted(signal.Signals(number).name)

    previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
        if living(run) and ended_at[-1] - ended_at[0] > LINGER_S:
            console.print(f"{kill(run)} processes had not ended {LINGER_S:g} s after the run, and were killed")
        return not living(run)

    follow(run, config.run.name, console, config.launch.plain or not console.is_terminal, over)


def conclude(run: RunFolder, config: FullConfig, console: Console) -> int:
    """Say how the run ended; exit status 0 if it is complete."""
    outcome = run.ended() or {"state": "failed", "cause": "nobody has recorded why"}
    if outcome["state"] == "failed":
        console.print(f"the run failed: {outcome['cause']}", style="bold red", soft_wrap=True)
        console.print(f"logs: {run.jobs}", soft_wrap=True)
        return 1
    if run.summary.exists():
        for line in view.summary_lines(msgspec.json.decode(run.summary.read_bytes())):
            console.print(line, soft_wrap=True)
    if config.trainer.export_final:
        console.print(f"trained model {run.final_model}", soft_wrap=True)
    console.print(f"summary {run.summary}", soft_wrap=True)
    return 0

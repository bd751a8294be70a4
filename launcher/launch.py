"""From a checked config to a running run: folder, preparation, submission, and then watching it or leaving it alone."""

from __future__ import annotations

import fcntl
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import yaml
from rich.console import Console

from launcher import view
from launcher.jobs import job_specs
from launcher.living import living, wait_for_end
from launcher.schema import FullConfig
from launcher.stop import stop
from launcher.watch import follow
from workers.config import ConfigError
from workers.rundir import RunFolder, write_atomic

ROOT = Path(__file__).resolve().parent.parent


class Interrupted(Exception):
    """A signal told the launcher to end the run."""


def new_run_path(config: FullConfig) -> Path:
    """`run.dir`, or a new name below runs/."""
    if config.run.dir:
        return Path(config.run.dir).expanduser().absolute()
    return Path("runs").absolute() / f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def prepare(run: RunFolder, config: FullConfig) -> None:
    """Write the config and have the run folder prepared. Raises `ConfigError` with what the preparation found wrong."""
    record = msgspec.to_builtins(config)
    write_atomic(run.config, msgspec.json.format(msgspec.json.encode(config.for_workers())))
    write_atomic(run.config_yaml, yaml.safe_dump(record, sort_keys=False).encode())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))}
    result = subprocess.run([sys.executable, "-m", "workers.prepare", str(run.path)], env=environment, stdin=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        raise ConfigError(result.stderr.strip().splitlines()[-1] if result.returncode == 2 else f"preparation failed:\n{result.stderr}")


def launch(config: FullConfig) -> int:
    """Start a run, and unless detached stay with it to its end; returns the exit status. Raises `ConfigError`, `RunFolderError`."""
    from launcher.submit import describe, submit

    console = Console()
    plan = config.plan()
    console.print(f"plan: {plan.describe()}", highlight=False)
    path = new_run_path(config)
    if config.launch.dry_run:
        for spec in job_specs(plan, config.run.name, RunFolder(path)):
            console.print(describe(spec, config, RunFolder(path)), highlight=False, soft_wrap=True, markup=False)
        return 0
    run = RunFolder.create(path)
    try:
        prepare(run, config)
        config.run.dir = str(run.path)
        with attached(run, config.launch.detach):
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            jobs = submit(job_specs(plan, config.run.name, run), config, run)
            for job in jobs:
                console.print(f"job {job.job_id}  log {job.paths.stdout}", highlight=False, soft_wrap=True)
            console.print(f"run folder {run.path}", highlight=False, soft_wrap=True)
            if config.launch.detach:
                console.print(f"watch it: headway watch {run.path}\nend it:   headway stop {run.path}", highlight=False, soft_wrap=True)
                return 0
            return stay(run, config, console)
    except ConfigError:
        discard(run)
        raise


def discard(run: RunFolder) -> None:
    """Remove the folder of a run that never began, so that the corrected command can use the same one."""
    import shutil

    if not run.submitted.exists():
        shutil.rmtree(run.path)


@contextmanager
def attached(run: RunFolder, detach: bool) -> Iterator[None]:
    """Hold the launcher's lock while attached: if this process dies, the kernel lets go of it and the run ends."""
    if detach:
        yield
        return
    descriptor = os.open(run.launcher_lock, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        run.launcher_lock.unlink(missing_ok=True)
        os.close(descriptor)


def stay(run: RunFolder, config: FullConfig, console: Console) -> int:
    """Show the run until all its processes have ended; a signal ends it in order."""
    def interrupt(number: int, _: object) -> None:
        raise Interrupted(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    plain = config.launch.plain or not console.is_terminal
    try:
        follow(run, config.run.name, console, plain, lambda: run.ended() is not None and not living(run), supervise=True)
    except Interrupted as error:
        console.print(f"\n{error}: ending the run; once more to end it by force")
        try:
            console.print(stop(run, f"the launcher got {error}"))
        except Interrupted:
            console.print(stop(run, f"the launcher got {error}", patience_s=0))
    wait_for_end(run, 20.0)
    return conclude(run, console)


def conclude(run: RunFolder, console: Console) -> int:
    """Say how the run ended; exit status 0 if it is complete."""
    outcome = run.ended() or {"state": "failed", "cause": "nobody has recorded why"}
    if outcome["state"] == "failed":
        console.print(f"the run failed: {outcome['cause']}", style="bold red", highlight=False, soft_wrap=True, markup=False)
        console.print(f"logs: {run.jobs}", highlight=False, soft_wrap=True)
        return 1
    if run.summary.exists():
        for line in view.summary_lines(msgspec.json.decode(run.summary.read_bytes())):
            console.print(line, highlight=False, soft_wrap=True)
    console.print(f"trained model {run.final_model}\nsummary {run.summary}", highlight=False, soft_wrap=True)
    return 0

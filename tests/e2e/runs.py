"""Real runs for tests: started by the command, looked at through their folder, and afterwards nothing may be left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from launcher.jobs.liveness import kill, submitted_jobs
from tests.support.processes import command_line, lives
from workers.config import load
from workers.run.files import read_lines
from workers.run.folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
START_S, END_S = 400.0, 200.0
"""Many times what a free machine takes: others may be busy on this one."""
POLL_S = 0.2


def wait_for(what: str, look: Callable[[], Any], timeout_s: float) -> Any:
    """Poll until `look` gives something true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)
    return found


def headway(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
    """Run the command to its end."""
    return subprocess.run([sys.executable, "-m", "launcher", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=START_S,
                          check=False, **options)


class LiveRun:
    """A run of a small experiment, with a foreground launcher as a child of the test."""

    def __init__(self, path: Path, *overrides: str, experiment: str = "tiny") -> None:
        self.run = RunFolder(path)
        self.output = path.with_suffix(".output")
        with self.output.open("wb") as output:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "launcher", "--plain", f"experiment={experiment}", f"run.dir={path}", *overrides],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        self.seen: set[psutil.Process] = set()

    def look(self) -> set[psutil.Process]:
        """Every living process of the run now; all that were ever seen are remembered."""
        everyone = {process.pid: process for process in psutil.process_iter(["ppid"])}  # one look at /proc for all: it is most of what this costs
        found = {pid for pid in everyone if pid == self.launcher.pid or everyone[pid] in self.seen}
        while more := {pid for pid in everyone.keys() - found if everyone[pid].info["ppid"] in found}:
            found |= more
        self.seen |= {everyone[pid] for pid in found}
        return {process for process in self.seen if lives(process)}

    def after_steps(self, number: int) -> LiveRun:
        """Wait until `number` training steps are done."""
        def done() -> bool:
            self.look()
            assert self.launcher.poll() is None, f"the run ended early:\n{self.output.read_text()}"
            return len(read_lines(self.run.metrics)) >= number

        wait_for(f"{number} training steps", done, START_S)
        self.look()
        return self

    def process(self, name: str) -> psutil.Process:
        """One of the run's processes by what it is."""
        jobs = {job["name"].rsplit("-", 1)[1]: int(job["job_id"]) for job in submitted_jobs(self.run)}
        if name == "launcher":
            return psutil.Process(self.launcher.pid)
        if name.endswith("controller"):
            return psutil.Process(jobs[name.split()[0]])
        if name.endswith("task"):
            return psutil.Process(jobs[name.split()[0]]).children()[0]
        module = {"engine": f"workers.rollout.engines.servers.{load(self.run.config).engine.server.value}",
                  "coordinator": "workers.coordinator.process.main",
                  "reward": "workers.reward.pool.worker_process"}[name]
        return next(process for process in self.look() if module in command_line(process))

    def assert_nothing_left(self) -> None:
        """All processes ever seen have ended, and the published weights are gone."""
        wait_for("the end of every process", lambda: not self.look(), END_S)
        assert self.launcher.wait(END_S) is not None
        assert not self.run.weights(load(self.run.config).weights.dir).exists()


@contextlib.contextmanager
def live_run(path: Path, *overrides: str, experiment: str = "tiny") -> Iterator[LiveRun]:
    """A run that is ended by force if the test fails in between."""
    run = LiveRun(path, *overrides, experiment=experiment)
    try:
        yield run
    finally:
        for process in run.look():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.launcher.wait()
        if run.run.submitted.exists():
            kill(run.run)  # what a detached launcher has left


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes."""
    return {**os.environ, **changes}

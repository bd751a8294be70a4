"""What the launcher decides about jobs and folders, on real processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from launcher import watch
from launcher.__main__ import in_order
from launcher.attached import attached
from launcher.living import kill, living
from workers.config import Config
from workers.rundir import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run")
    config = Config()
    config.weights.dir = str(tmp_path)
    folder.config.write_bytes(msgspec.json.encode(config))
    return folder


def sleeper() -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


def submitted(run: RunFolder, **jobs: subprocess.Popen) -> None:
    record = [{"name": f"run-{name.rstrip('0123456789')}", "job_id": str(process.pid), "log": "log",
               "created": psutil.Process(process.pid).create_time()}
              for name, process in jobs.items()]
    run.submitted.write_text(json.dumps({"jobs": record}))


@pytest.mark.parametrize(("dead", "min_replicas", "ends"), [
    ("train", 1, True), ("inference0", 1, False), ("inference0", 2, True), (None, 2, False)])
def test_a_dead_job_ends_the_run_only_if_the_run_cannot_do_without(
        run: RunFolder, monkeypatch: pytest.MonkeyPatch, dead: str | None, min_replicas: int, ends: bool) -> None:
    monkeypatch.setattr(watch, "LOST_S", -1.0)
    jobs = {name: sleeper() for name in ("inference0", "inference1", "train")}
    submitted(run, **jobs)
    try:
        if dead is not None:
            jobs[dead].kill()
            jobs[dead].wait()
        watch.notice_dead_jobs(run, min_replicas, {})
        assert (run.ended() is not None) == ends
        assert not ends or "has ended before the run was over" in run.ended()["cause"]
    finally:
        for process in jobs.values():
            process.kill()
            process.wait()


def test_force_finds_enlisted_orphans_and_removes_the_weights(run: RunFolder, tmp_path: Path) -> None:
    orphan = sleeper()
    (run.processes / str(orphan.pid)).write_text(repr(psutil.Process(orphan.pid).create_time()))
    (run.processes / "1").write_text("0.5")  # an id that now belongs to another process
    weights = run.weights(str(tmp_path))
    weights.mkdir()
    assert [process.pid for process in living(run)] == [orphan.pid]
    assert kill(run) == 1
    orphan.wait(10)
    assert living(run) == [] and not weights.exists()


def test_the_lock_outlives_an_error_but_not_a_clean_end(run: RunFolder) -> None:
    with attached(run, detach=False):
        assert not run.launcher_is_gone()
    assert not run.launcher_is_gone() and not run.launcher_lock.exists()
    with pytest.raises(KeyError), attached(run, detach=False):
        raise KeyError
    assert run.launcher_is_gone(), "the coordinator then ends the run"


def test_detached_runs_have_no_lock(run: RunFolder) -> None:
    with attached(run, detach=True):
        assert not run.launcher_lock.exists() and not run.launcher_is_gone()


@pytest.mark.parametrize(("given", "taken"), [
    (["a=1", "-m", "b=1,2", "--dry-run", "c=3"], ["-m", "a=1", "b=1,2", "c=3", "launch.dry_run=true"]),
    (["--cfg", "job", "a=1"], ["--cfg", "job", "a=1"]),
    (["--detach", "--plain", "--multirun"], ["--multirun", "launch.detach=true", "launch.plain=true"])])
def test_flags_may_stand_anywhere(given: list[str], taken: list[str]) -> None:
    assert in_order(given) == taken

"""What the launcher decides about jobs and folders, on real processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from rich.console import Console

from launcher.cli import starting
from launcher.config.cluster import RoleConfig
from launcher.config.schema import FullConfig, as_yaml, read_full
from launcher.jobs.liveness import kill, still_there
from launcher.jobs.sbatch_script import ROOT
from launcher.launch import on_slurm
from launcher.launch.local import attached
from launcher.monitoring import watch
from launcher.slurm import queries
from launcher.slurm.queries import NodeKind
from launcher.sweep import Sweep
from workers.config import AllocationConfig, ClusterKind, Config, ConfigError
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError


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


@pytest.mark.parametrize(("dead", "min_replicas", "status", "ends"), [
    ("train", 1, {}, True), ("inference0", 1, {}, False), ("inference0", 2, {"complete": False, "suspended": ""}, True), (None, 2, {}, False),
    ("inference0", 2, {"complete": True}, False), ("train", 1, {"complete": True}, True), ("inference0", 2, {"suspended": "headway stop"}, False)])
def test_a_dead_job_ends_the_run_only_if_the_run_cannot_do_without(
        run: RunFolder, monkeypatch: pytest.MonkeyPatch, dead: str | None, min_replicas: int, status: dict, ends: bool) -> None:
    run.status.write_text(json.dumps(status))
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
    assert [process.pid for process in still_there(run)] == [orphan.pid]
    assert kill(run) == 1
    orphan.wait(120)
    assert still_there(run) == [] and not weights.exists()


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


def slurm_config() -> FullConfig:
    full = FullConfig()
    full.run.name, full.cluster.kind, full.allocation, full.model.path = "x", ClusterKind.slurm, AllocationConfig(64), "/no/such/model"
    full.cluster.inference = RoleConfig(time="60")
    full.cluster.train = RoleConfig(time="60")
    return full


def test_a_sweep_with_one_run_folder_is_refused(tmp_path: Path) -> None:
    full = slurm_config()
    full.run.dir = str(tmp_path / "mine")
    with pytest.raises(ConfigError, match=r"run.dir='.*/mine': cannot be given with -m.*Leave it out; hydra.sweep.dir"):
        on_slurm.launch(full, Sweep(tmp_path, 0, ()))
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_without_a_cluster_says_what_it_could_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    full = slurm_config()
    full.launch.dry_run = True
    assert on_slurm.launch(full) == 0
    said = capfd.readouterr().out
    assert "not checked: the model, its memory" in said and "model.path='/no/such/model' is not on this machine" in said
    assert "not checked by SLURM, which gives no answer here: scontrol: not found" in said and said.count("not found on PATH") == 1
    assert "give allocation.devices_per_node=N" in said and "#SBATCH --gres=gpu:16" in said
    assert full.cluster.train.devices_per_node == 0


def test_a_dry_run_asks_a_controller_that_is_away_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("scontrol", "sinfo"):
        (tmp_path / name).write_text(f'#!/bin/bash\necho x >>{tmp_path}/calls\necho "Unable to contact slurm controller" >&2\nexit 1\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    full = slurm_config()
    full.launch.dry_run = True
    assert on_slurm.launch(full) == 0 and "Unable to contact slurm controller" in capsys.readouterr().out
    assert (tmp_path / "calls").read_text() == "x\n"
    with pytest.raises(SlurmError):
        queries.node_kinds("gpu", patience_s=0)
    assert (tmp_path / "calls").read_text() == "x\n" * 2, "after the dry run it is asked again"


def test_what_the_launcher_fills_in_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(queries, "node_kinds", lambda name, patience_s=None: [NodeKind(4, 8, 64, 500_000)])
    monkeypatch.setenv("PYTHONPATH", "/mine")
    full = slurm_config()
    full.cluster.train.partition = "gpu"
    folder = RunFolder(tmp_path)
    on_slurm.settle(full, folder, Console())
    folder.config_yaml.write_bytes(as_yaml(full))
    folder.config.write_bytes(msgspec.json.encode(full.for_workers()))
    full.model.path = "/m"
    folder.config.write_bytes(msgspec.json.encode(full.for_workers()))
    again = read_full(folder)
    assert again.cluster.train.devices_per_node == 8 and "cluster.train.devices_per_node=8, as the nodes of partition gpu" in capsys.readouterr().out
    assert again.cluster.train.pythonpath == again.cluster.inference.pythonpath == f"{ROOT}:/mine"
    assert again.cluster.train.sbatch == again.cluster.inference.sbatch == {"chdir": os.getcwd()}, "relative paths are of here"
    full.cluster.train.sbatch, full.cluster.train.exclude, full.cluster.inference.exclude = {"--chdir": "/elsewhere"}, "./bad", "n1"
    on_slurm.settle(full, folder, Console())
    assert full.cluster.train.sbatch == {"--chdir": "/elsewhere"}
    assert (full.cluster.train.exclude, full.cluster.inference.exclude) == (f"{os.getcwd()}/bad", "n1"), "sbatch reads a file from where it is called"


@pytest.mark.parametrize("started", [False, True])
def test_a_sweep_probes_for_its_first_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    probed: list[object] = []

    @contextlib.contextmanager
    def probing(*_: object) -> Iterator[Callable[[], list[str]]]:
        probed.append(1)
        yield list

    sweep = Sweep(tmp_path / "sweep", 3, ())
    if started:
        sweep.add(RunFolder(tmp_path / "before"))
    monkeypatch.setattr(on_slurm, "settle", lambda config, run, console: None)
    monkeypatch.setattr(on_slurm.check, "check", lambda specs, *_: specs)
    monkeypatch.setattr(on_slurm, "probing", probing)
    monkeypatch.setattr(on_slurm, "prepare", lambda run, config: None)
    monkeypatch.setattr(on_slurm, "start_on_slurm", lambda *_: 0)
    monkeypatch.setenv("PYTHONPATH", "")
    assert on_slurm.launch(slurm_config(), sweep) == 0 and len(probed) == (not started)


SBATCH = Path(__file__).resolve().parents[4] / "slurm" / "launch.sbatch"


@pytest.mark.parametrize(("arguments", "there", "called"), [
    ("a=1", [], "--plain a=1 run.dir=RUN"),
    ("a=1,2 -m", [], "--plain a=1,2 -m"),
    ("a=1", ["jobs/x", "rendezvous/x", "jobs.json"], "watch --plain RUN"),
    ("a=1", ["jobs/x", "rendezvous/x"], "--plain a=1 run.dir=RUN"),
    ("a=1", ["precious"], "--plain a=1 run.dir=RUN")])
def test_the_launcher_as_a_job(tmp_path: Path, arguments: str, there: list[str], called: str) -> None:
    (tmp_path / "headway").write_text('#!/bin/bash\necho "$@" >"$CALLS"\n')
    (tmp_path / "headway").chmod(0o755)
    path = tmp_path / "the run"
    for name in there:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(tmp_path / "calls"), "HEADWAY_RUN": str(path), "SLURM_JOB_ID": "7",
                   "SLURM_JOB_NAME": "x"}
    subprocess.run(["bash", str(SBATCH), *arguments.split()], env=environment, cwd=tmp_path, check=True)
    assert (tmp_path / "calls").read_text().strip() == called.replace("RUN", str(path))
    kept = sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert kept == ([] if there == ["jobs/x", "rendezvous/x"] else sorted(there)), "only an unfinished folder of ours is removed"


def test_a_sweep_that_was_interrupted_is_not_submitted_twice(tmp_path: Path) -> None:
    done = subprocess.run(["bash", str(SBATCH), "-m", "a=1,2"], env={"PATH": "/usr/bin:/bin", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_ID": "7",
                          "SLURM_JOB_NAME": "x"}, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "was interrupted" in done.stderr


@pytest.mark.parametrize(("command", "given", "sweep", "rest", "flags"), [
    ("run", ["a=1", "-m", "b=1,2", "--dry-run", "c=3"], True, ["a=1", "b=1,2", "c=3"], ["launch.dry_run=true"]),
    ("run", ["--cfg", "job", "a=1"], False, ["a=1"], []),
    ("run", ["--detach", "--plain", "--multirun"], True, [], ["launch.detach=true", "launch.plain=true"]),
    ("eval", ["--dry-run", "greedy", "evaluation.run=x"], False, ["eval=greedy", "evaluation.run=x"], ["launch.dry_run=true"]),
    ("eval", ["eval=greedy", "evaluation.run=x"], False, ["eval=greedy", "evaluation.run=x"], []),
    ("selftest", ["a=1", "--keep"], False, ["a=1"], ["launch.keep=true", "launch.selftest=true"])])
def test_flags_may_stand_anywhere(command: str, given: list[str], sweep: bool, rest: list[str], flags: list[str]) -> None:
    options, *found = starting.parsed(command, given)
    assert found == [rest, flags] and options.sweep == sweep

"""A run whose disk is full: it ends, says why, and can be stopped. On a real file system of 2 MiB, which only root can mount."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from rich.console import Console

from launcher.config.schema import FullConfig
from launcher.jobs.liveness import no_room, still_there
from launcher.launch import local
from launcher.monitoring.stop import stop
from workers.config import Config
from workers.coordinator.process.main import CoordinatorWorker
from workers.run import incarnations
from workers.run.files import is_full, write_atomic
from workers.run.folder import RunFolder, RunFolderError

NOWHERE = "nothing more can be written there, the disk or your quota is full"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    (folder := tmp_path / "disk").mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True, check=False) \
        if os.getuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def run(disk: Path) -> RunFolder:
    folder, config = RunFolder.create(disk / "run"), Config()
    config.weights.dir = "run"
    folder.config.write_bytes(msgspec.json.encode(config))
    return folder


def fill(disk: Path) -> None:
    with pytest.raises(OSError) as error, (disk / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    assert is_full(error.value)


@pytest.fixture
def process(run: RunFolder) -> Iterator[subprocess.Popen]:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    run.submitted.write_text(json.dumps({"jobs": [{"name": "run-train", "job_id": str(child.pid), "log": "log",
                                                   "created": psutil.Process(child.pid).create_time()}]}))
    yield child
    child.kill()
    child.wait()


def test_how_a_run_ended_finds_room(disk: Path, run: RunFolder) -> None:
    assert no_room(run) == ""
    fill(disk)
    with pytest.raises(OSError):
        write_atomic(run.status, b"{}")
    assert f"run.dir={run.path}: {NOWHERE} (0 KiB are free)" in no_room(run)
    incarnations.record_end(run, 1, "crashed", "no room", 3, 2)
    run.request_stop("enough")
    assert run.end("the disk is full", "coordinator") and not run.end("another cause", "launcher")
    assert run.stop_requested() == {"reason": "enough", "drain": False} and (run.ended() or {})["cause"] == "the disk is full"
    assert not run.reserve.exists()
    with pytest.raises(RunFolderError, match="Free some space"):
        run.keep_room()  # as `headway resume` does
    (disk / "filler").unlink()
    run.keep_room()
    fill(disk)
    run.outcome.unlink()
    assert run.end("again", "coordinator")


def test_a_run_folder_on_a_full_disk_is_refused_and_not_left_there(disk: Path) -> None:
    fill(disk)
    with pytest.raises(RunFolderError, match=rf"run.dir={disk}/run: (cannot be written to .No space left on device.|{NOWHERE}). Free some space"):
        RunFolder.create(disk / "run")
    assert [entry.name for entry in disk.iterdir()] == ["filler"]


def test_a_coordinator_that_cannot_write_ends_the_run(disk: Path, run: RunFolder) -> None:
    causes: list[str] = []
    worker = SimpleNamespace(run=run, core=SimpleNamespace(end=causes.append))
    CoordinatorWorker.on_disk(worker, lambda: write_atomic(run.status, b"{}"))  # type: ignore[arg-type]
    assert not causes
    fill(disk)
    CoordinatorWorker.on_disk(worker, lambda: write_atomic(run.status, b"{}"))  # type: ignore[arg-type]
    [cause] = causes
    assert NOWHERE in cause and f"headway resume {run.path}" in cause
    with pytest.raises(FileNotFoundError):
        CoordinatorWorker.on_disk(worker, lambda: write_atomic(disk / "nowhere" / "status.json", b"{}"))  # type: ignore[arg-type]


def test_stop_ends_by_force_what_it_cannot_ask(disk: Path, run: RunFolder, process: subprocess.Popen) -> None:
    run.reserve.unlink()
    fill(disk)
    said = stop(run, "by headway stop", patience_s=0)
    assert NOWHERE in said and "stopped by force: 1 processes had not ended" in said
    assert process.wait(10) is not None and not still_there(run)


def test_an_attached_launcher_leaves_nothing_alive(disk: Path, run: RunFolder, process: subprocess.Popen, monkeypatch: pytest.MonkeyPatch) -> None:
    def stays(*_: object) -> None:
        run.reserve.unlink()
        fill(disk)
        run.end("a job has died", "launcher")

    monkeypatch.setattr(local, "submit", lambda *_: [])
    monkeypatch.setattr(local, "stay", stays)
    console = Console(record=True, width=400)
    assert local.start_here(run, FullConfig(), (), console) == 1
    assert NOWHERE in (said := console.export_text()) and "1 processes of the run were ended by force" in said
    assert process.wait(10) is not None and not still_there(run)

"""A run whose disk is full: it ends, says why, and can be stopped. On a real file system of 2 MiB, which only root can mount."""

from __future__ import annotations

import json
import os
import resource
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
from tests.support.small_disk import small_disk
from tests.support.small_run import Prompts
from workers.config import Config
from workers.coordinator.core import Coordinator
from workers.coordinator.process import storage
from workers.coordinator.process.machine import Machine
from workers.coordinator.process.storage import Storage
from workers.metrics.recorder import Recorder
from workers.run import incarnations, outage
from workers.run.files import is_full, read_lines, write_atomic
from workers.run.folder import RunFolder, RunFolderError

NOWHERE = "nothing more can be written there, the disk or your quota is full"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "2m") as folder:
        yield folder


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


def test_a_coordinator_that_cannot_write_for_long_ends_the_run(disk: Path, run: RunFolder, monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str]) -> None:
    core, clock = Coordinator(Config(), Prompts(), 1, 0.0), SimpleNamespace(now=1000.0)
    monkeypatch.setattr(storage, "time", SimpleNamespace(monotonic=lambda: clock.now))
    kept = Storage(run, Machine(core), limit_s=60.0)
    assert kept.attempt(lambda: write_atomic(run.status, b"{}"))
    fill(disk)
    for clock.now in (1000.0, 1059.0):
        assert not kept.attempt(lambda: write_atomic(run.status, b"{}")) and core.ended is None
    assert core.last_progress == 1059.0, "that is no stall"
    assert capsys.readouterr().out.count(NOWHERE) == 1, "it is said, once"
    kept.worked()
    for clock.now in (1060.0, 1119.0):
        assert not kept.attempt(lambda: write_atomic(run.status, b"{}")) and core.ended is None, "it had been freed meanwhile"
    clock.now = 1120.0
    assert not kept.attempt(lambda: write_atomic(run.status, b"{}"))
    assert NOWHERE in (core.ended or "") and f"headway resume {run.path}" in (core.ended or "")
    with pytest.raises(FileNotFoundError):
        kept.attempt(lambda: write_atomic(disk / "nowhere" / "status.json", b"{}"))


def test_what_a_full_disk_does_not_take_is_held_and_written_later(disk: Path, run: RunFolder) -> None:
    recorder = Recorder(run)
    recorder.step({"step": 1})
    recorder.write()
    fill(disk)
    line = "x" * 5000  # more than is left of the file's last page: a part of it would find room
    recorder.step({"step": 2, "line": line})
    recorder.consumed(1, [3, 4])
    for _ in range(2):
        with pytest.raises(OSError) as error:
            recorder.write()
        assert is_full(error.value) and recorder.num_held == 2
    assert read_lines(run.metrics) == [{"step": 1}] and run.metrics.read_bytes().endswith(b"\n"), "no line is there in part"
    with pytest.raises(OSError):
        recorder.positions()
    (disk / "filler").unlink()
    assert recorder.positions()["consumed.jsonl"] > 0
    assert [record["step"] for record in read_lines(run.metrics)] == [1, 2] and read_lines(run.consumed) == [{"step": 1, "groups": [3, 4]}]
    recorder.close()


def test_a_log_on_a_full_disk_ends_nobody(disk: Path, run: RunFolder) -> None:
    fill(disk)
    (free := disk / "free").write_bytes(b"")
    reading, writing = os.pipe()
    program = f"""import os, sys
from workers.run.processes import keep_logging
keep_logging()
print('lost' * 5000, flush=True)
os.write({writing}, b'ready\\n')
sys.stdin.readline()
print('found', flush=True)"""
    with free.open("ab") as log, subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=log, stderr=log,
                                                  pass_fds=[writing]) as child:
        os.close(writing)
        assert child.stdin is not None and os.read(reading, 10) == b"ready\n"
        (disk / "filler").unlink()
        child.stdin.write(b"\n")
        child.stdin.close()
    os.close(reading)
    assert child.returncode == 0 and "bytes of this log found no room]\nfound" in free.read_text()


@pytest.mark.parametrize("how", ["full", "moved away"])
def test_a_process_waits_for_a_run_folder_that_is_full_or_away(disk: Path, run: RunFolder, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        fill(disk) if how == "full" else run.path.rename(disk / "elsewhere")

    def back() -> None:
        (disk / "filler").unlink() if how == "full" else (disk / "elsewhere").rename(run.path)

    clock = SimpleNamespace(now=0.0, back_at=30.0)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if clock.now >= clock.back_at:
            clock.back_at = float("inf")
            back()

    monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    told: list[str] = []

    def write() -> None:
        write_atomic(run.status, b"{}" + bytes(9000))

    away()
    outage.patiently(run.patient(1.0), write, told.append)
    assert run.status.exists() and 30 <= clock.now < 32 and told[1:] == [""] and "60 s at most (run.outage_minutes)" in told[0]
    run.status.unlink()
    away()
    with pytest.raises(OSError):
        outage.patiently(run.patient(1.0), write, told.append)
    assert 90 <= clock.now < 93
    with pytest.raises(OSError):
        outage.patiently(run, write, told.append)
    with pytest.raises(OSError):
        outage.patiently(run.patient(1.0), write, told.append, hurry=lambda: True)
    assert clock.now < 93, "who has no patience, or must go, does not wait"
    back()
    with pytest.raises(FileNotFoundError):
        outage.patiently(run.patient(1.0), (run.path / "nothing").read_bytes)


def test_stop_ends_by_force_what_it_cannot_ask(disk: Path, run: RunFolder, process: subprocess.Popen) -> None:
    run.reserve.unlink()
    fill(disk)
    said = stop(run, "by headway stop", patience_s=0)
    assert NOWHERE in said and "stopped by force: 1 processes had not ended" in said
    assert process.wait(60) is not None and not still_there(run)


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
    assert process.wait(60) is not None and not still_there(run)


def test_a_process_without_descriptors_waits_for_some(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run").patient(1.0)
    told: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = []

    def tell(text: str) -> None:
        told.append(text)
        while used:  # somebody else has closed something meanwhile
            os.close(used.pop())

    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))
    try:
        with pytest.raises(OSError):
            while True:
                used.append(os.open(os.devnull, os.O_RDONLY))
        outage.patiently(run, lambda: write_atomic(run.status, b"{}"), tell)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        tell("")
    assert "all descriptors of this process are in use" in told[0] and told[1] == "" and run.status.read_bytes() == b"{}"

"""The run folder: private, claimed and ended exactly once among real processes, and never half written."""

from __future__ import annotations

import errno
import fcntl
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import NUM_PROCESSES, beside, together
from workers.run.files import write_atomic, write_once
from workers.run.folder import RunFolder, RunFolderError
from workers.run.paths import Entry

DEADLINE_S = 120.0
HOLDER = ("import fcntl, os, sys, time; file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600); "
          "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)")


def new_run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("{}")
    return run


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_create_makes_everything_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        run = RunFolder.create(tmp_path / "deep" / "run")
    finally:
        os.umask(old)
    folders = [run.path, run.jobs, run.processes, run.keys, run.epochs, run.rendezvous, run.checkpoints, run.partials]
    assert [folder.stat().st_mode & 0o7777 for folder in folders] == [0o700] * 8
    assert sorted(path.name for path in run.path.iterdir()) == [
        "checkpoints", "epochs", "jobs", "keys", "partials", "processes", "rendezvous", "reserve"]


def test_a_relative_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(Path("here"))
    assert run.path == tmp_path / "here"
    run.config.write_text("{}")
    assert RunFolder.open(Path("here")).path == tmp_path / "here"


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_create_refuses_what_exists_and_does_not_touch_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "folder":
        path.mkdir(mode=0o755)
        path.chmod(0o755)
        (path / "mine").write_text("mine")
    elif kind == "file":
        path.write_text("mine")
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"run\.dir=.*/run: (exists already|cannot be made \(File exists\)).*Choose (another|a) run\.dir"):
        RunFolder.create(path)
    if kind == "folder":
        assert path.stat().st_mode & 0o777 == 0o755 and [entry.name for entry in path.iterdir()] == ["mine"]
    assert kind != "file" or path.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_create_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"run\.dir=.*file/deep/run: cannot be made \(Not a directory\)\. Choose a run\.dir"):
        RunFolder.create(tmp_path / "file" / "deep" / "run")


@pytest.mark.parametrize("place", ["/proc/headway", "/sys/headway"])
def test_create_where_nobody_may_write(place: str) -> None:
    with pytest.raises(RunFolderError, match=r"cannot be made \(.+\)\. Choose a run\.dir that you may write to"):
        RunFolder.create(Path(place))


def test_create_right_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"run\.dir=.*file/run: cannot be made"):
        RunFolder.create(tmp_path / "file" / "run")


def test_only_one_of_many_creates_the_folder(tmp_path: Path) -> None:
    def make(index: int) -> bool:
        try:
            RunFolder.create(tmp_path / "runs" / "run")
        except RunFolderError as error:
            assert "exists already" in str(error)
            return False
        return True

    assert sum(together(make)) == 1


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o704, 0o710])
def test_open_refuses_a_folder_that_others_may_enter(tmp_path: Path, mode: int) -> None:
    run = new_run(tmp_path)
    assert RunFolder.open(run.path) == run
    run.path.chmod(mode)
    with pytest.raises(RunFolderError, match=r"readable by others.*chmod 700 .*/run$"):
        RunFolder.open(run.path)


@pytest.mark.parametrize("kind", ["missing", "empty", "file", "config is a folder"])
def test_open_refuses_what_is_no_run_folder(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.touch()
    elif kind != "missing":
        path.mkdir(mode=0o700)
    if kind == "config is a folder":
        (path / "config.json").mkdir()
    with pytest.raises(RunFolderError, match=r"/run: not a run folder \(no config\.json\)\. Give the folder that the launcher printed"):
        RunFolder.open(path)


def test_the_first_end_counts_and_is_whole(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    causes = [f"cause {index} " + chr(ord("a") + index) * 200_000 for index in range(NUM_PROCESSES)]

    def end(index: int) -> bool:
        first = run.end(causes[index], f"writer {index}")
        record = run.ended()  # whoever was first: nobody may read a part of it
        assert record is not None and record["cause"] in causes and record["reported_by"] == f"writer {causes.index(record['cause'])}"
        return first

    before = time.time()
    assert sum(together(end)) == 1
    record = run.ended()
    assert record is not None and record["state"] == "failed" and before - 1 <= record["time"] <= time.time() + 1
    assert run.end("", "latecomer") is False and run.ended() == record
    assert hidden(run.path) == [] and run.outcome.stat().st_mode & 0o777 == 0o600


def test_an_end_without_cause_is_complete(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.ended() is None
    assert run.end("", "coordinator") is True
    record = run.ended()
    assert record is not None and (record["state"], record["cause"], record["reported_by"]) == ("finished", "", "coordinator")


def test_a_stop_keeps_its_first_reason(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.stop_requested() is None
    run.request_stop("first", drain=True)
    run.request_stop("second")
    assert run.stop_requested() == {"reason": "first", "drain": True} and hidden(run.path) == []


def test_a_drained_run_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.end("stopped by someone", "coordinator", "drained") is True
    record = run.ended()
    assert record is not None and (record["state"], record["cause"]) == ("drained", "stopped by someone")


def test_arrays_are_those_that_have_been_submitted(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.submission() == {} and run.arrays("train") == []
    arrays = [{"role": "inference", "job_id": "7"}, {"role": "train", "job_id": "8"}, {"role": "inference", "job_id": None},
              {"role": "inference", "job_id": "9"}]
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": False, "arrays": arrays}))
    assert run.arrays("inference") == ["7", "9"] and run.arrays("train") == ["8"]
    run.submitted.write_text(json.dumps({"cluster": "local", "complete": True, "jobs": []}))
    assert run.arrays("inference") == []


def test_write_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert sum(together(lambda index: write_once(path, str(index).encode() * 100_000))) == 1
    assert len(set(path.read_text())) == 1 and len(path.read_text()) == 100_000
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_a_failing_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool, broken: str) -> None:
    path = tmp_path / "status.json"
    if existed:
        write_atomic(path, b"old")

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == (["status.json"] if existed else [])
    assert not existed or path.read_bytes() == b"old"


def test_a_failing_write_of_the_end_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(tmp_path)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        run.end("the engine died", "rollout")
    monkeypatch.undo()
    assert run.ended() is None and hidden(run.path) == []
    assert run.end("the engine died", "rollout") is True


def test_write_atomic_replaces_and_keeps_to_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    assert path.stat().st_mode & 0o777 == 0o600
    write_atomic(path, b"new", mode=0o640)
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_readers_never_see_a_part(tmp_path: Path) -> None:
    path, stop = tmp_path / "status.json", tmp_path / "stop"
    contents = [json.dumps({"text": letter * 300_000}).encode() for letter in "ab"]
    write_atomic(path, contents[0])

    def write_on(index: int) -> None:
        while not stop.exists():
            write_atomic(path, contents[index])

    with beside(write_on, 2):
        try:
            seen: set[bytes] = set()
            deadline = time.monotonic() + DEADLINE_S
            while len(seen) < 2 and time.monotonic() < deadline:
                content = path.read_bytes()
                assert content in contents
                seen.add(content)
        finally:
            stop.touch()
    assert len(seen) == 2
    assert hidden(tmp_path) == []


def holder(run: RunFolder) -> subprocess.Popen[str]:
    """A process that holds the launcher's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(run.launcher_lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_killed_launcher_is_noticed(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.launcher_is_gone() is False  # there never was one: it was detached
    with holder(run) as process:
        try:
            assert run.launcher_is_gone() is False
            process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE_S)
            assert run.launcher_is_gone() is True
            assert run.launcher_is_gone() is True  # asking does not change the answer
        finally:
            process.kill()


def test_asking_leaves_the_lock_free(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.launcher_lock.touch()
    assert run.launcher_is_gone() is True
    with run.launcher_lock.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert run.launcher_is_gone() is False


def test_a_launcher_that_leaves_in_order_is_not_gone(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with holder(run) as process:
        run.launcher_lock.unlink()  # first the file, then the lock
        process.kill()
        process.wait(DEADLINE_S)
    assert run.launcher_is_gone() is False


def test_paths_lie_in_the_folder_and_do_not_clash(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    paths = [getattr(run, name) for name in dir(RunFolder) if isinstance(inspect.getattr_static(RunFolder, name), Entry)]
    assert len(paths) > 15 and len(set(paths)) == len(paths)
    assert all(path.parent == tmp_path for path in paths)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_run_folder_of_another_user_is_not_opened(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    os.chown(run.path, 65534, 65534)
    with pytest.raises(RunFolderError, match="belongs to user 65534"):
        RunFolder.open(run.path)

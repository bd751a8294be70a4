"""Which log is meant, and which runs may go on."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from launcher.config.cluster import GpuRequest
from launcher.config.schema import FullConfig
from launcher.jobs.run_state import state
from launcher.launch import resume
from launcher.launch.changeable import changed
from launcher.launch.resume import refusal, reopen
from launcher.monitoring import supervisor
from launcher.monitoring.logs import NoLog, follow, main, newest_log, tail
from launcher.monitoring.supervisor import lock
from launcher.monitoring.supervisor_policy import UNANSWERED_S
from launcher.slurm import queries
from workers.config import ClusterKind, ConfigError, SelfTestAction
from workers.messages.parts import Version
from workers.run import checkpoints, incarnations
from workers.run.folder import RunFolder, RunFolderError
from workers.run.retention import Retention


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text("{}")
    return run


def on_slurm(run: RunFolder) -> None:
    arrays = [{"role": role, "name": f"x-{number}", "job_id": str(number)} for role, number in (("inference", 1), ("train", 2), ("train", 3))]
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": True, "arrays": arrays, "jobs": []}))
    logs = ("1_0_0_log.out", "1_1_0_log.out", "1_10_0_log.out", "1_10_1_log.out", "2_0_0_log.out", "2_0_1_log.out", "3_0_0_log.out", "3_0_1_log.out",
            "coordinator.log", "engine-77.log", "engine-1_10.log", "9_0_0_log.out", "1_1_submitted.pkl")
    for age, name in enumerate(logs):
        (run.jobs / name).write_text(f"this is {name}\n")
        os.utime(run.jobs / name, (1000 + age, 1000 + age))


def test_the_newest_log_of_a_part(run: RunFolder) -> None:
    on_slurm(run)
    worker = {"name": "rollout 3", "job": "1_10", "pid": 5}
    run.status.write_text(json.dumps({"workers": [worker, {"name": "rollout 4", "job": "1_1", "pid": 77}]}))
    for role, which, name in (("inference", "", "1_10_0_log.out"), ("inference", "1_1", "1_1_0_log.out"), ("inference", "3", "1_10_0_log.out"),
                              ("inference", "1_10_1", "1_10_1_log.out"), ("inference", "1_10", "1_10_0_log.out"),
                              ("train", "", "3_0_0_log.out"), ("train", "2_0", "2_0_0_log.out"), ("train", "2_0_1", "2_0_1_log.out"),
                              ("train", "2_0_0", "2_0_0_log.out"),
                              ("train", "0", "3_0_0_log.out"), ("coordinator", "", "coordinator.log"), ("engine", "", "engine-1_10.log"),
                              ("engine", "3", "engine-1_10.log"), ("engine", "4", "engine-77.log")):
        assert newest_log(run, role, which).name == name, (role, which)
    for role, which, words in (("inference", "7", "no such worker"), ("inference", "1_7", "no log of inference 1_7"), ("inference", "2_0", "no log")):
        with pytest.raises(NoLog, match=words):
            newest_log(run, role, which)


def test_logs_on_one_machine(run: RunFolder) -> None:
    with pytest.raises(NoLog, match="There is: nothing"):
        newest_log(run, "train")
    log = run.jobs / "55_0_log.out"
    log.touch()
    run.submitted.write_text(json.dumps({"cluster": "local", "jobs": [{"name": "x-train", "job_id": "55", "created": 0.0, "log": str(log)}]}))
    assert newest_log(run, "train") == log
    (run.jobs / "rank1.log").touch()
    (run.jobs / "rank10.log").touch()
    for which, name in (("", log.name), ("0", log.name), ("1", "rank1.log"), ("10", "rank10.log")):
        assert newest_log(run, "train", which).name == name
    with pytest.raises(NoLog, match="no log of train 2 yet"):
        newest_log(run, "train", "2")


def test_the_log_of_a_worker_that_has_ended(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """Its number leads to no log any more; that of its job does. A log that is followed goes on until the run has ended."""
    gone = 2 ** 22 + 1  # no process: above the greatest id that Linux gives
    log = run.jobs / "4444444_0_log.out"
    log.write_text("said\n")
    jobs = [{"name": name, "job_id": job, "created": 0.0, "log": str(log)} for name, job in (("x-inference", "4444444"), ("x-train", "5"))]
    run.submitted.write_text(json.dumps({"cluster": "local", "jobs": jobs}))
    run.status.write_text(json.dumps({"workers": [{"name": "rollout 0", "job": "", "pid": gone}]}))
    for which, words in (("0", "rollout 0: its process has ended"), ("1", "rollout 1: no such worker")):
        with pytest.raises(NoLog, match=f"{words}.*the jobs of inference here were 4444444"):
            newest_log(run, "inference", which)
    assert newest_log(run, "inference", "4444444") == log
    run.end("", "test")
    follow(run, "inference", "0", log, 0)
    assert capsys.readouterr().out == "said\n"


@pytest.mark.parametrize(("content", "num_lines", "wanted"), [
    (b"", 5, b""), (b"a\nb\nc\n", 2, b"b\nc\n"), (b"a\nb\nc", 2, b"b\nc"), (b"a\n", 0, b""), (b"x" * 200_000 + b"\nend\n", 1, b"end\n"),
    (b"x" * 200_000 + b"\nend\n", 2, b"x" * 200_000 + b"\nend\n")])
def test_the_end_of_a_file(tmp_path: Path, content: bytes, num_lines: int, wanted: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    assert tail(tmp_path / "log", num_lines) == (wanted, len(content))


def test_the_command(run: RunFolder, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    on_slurm(run)
    run.end("", "test")
    assert main([str(run.path), "train", "--follow", "2_0_0", "-n", "1"]) == 0
    out, err = capfdbinary.readouterr()
    assert out == b"this is 2_0_0_log.out\n" and b"==>" in err
    assert main([str(run.path), "inference", "8_8"]) == 2


def checkpoint(run: RunFolder, epoch: int, step: int) -> Path:
    """Saved by the incarnation `epoch`; returns a file of it."""
    while run.newest_epoch() < epoch:
        incarnations.claim(run, "2_0", "5", 0, "trn0", 1, 0)
    folder = checkpoints.begin(run, Version(epoch, step))
    (folder / checkpoints.COORDINATOR).write_text("state")
    return checkpoints.commit(run, folder, Version(epoch, step), Retention(3)).coordinator


def config(**changes: Any) -> FullConfig:
    result = FullConfig()
    result.model.path = "model"
    result.run.num_steps = 100
    for key, value in changes.items():
        setattr(result.run, key, value)
    return result


def test_which_runs_go_on(run: RunFolder) -> None:
    now = time.time()
    assert refusal(run, config(), now) == "", "one that ended without a word, too"
    run.end("stopped: by the test", "test")
    checkpoint(run, 1, 40)
    assert refusal(run, config(), now) == ""
    assert "run.num_steps=39: must be at least the 40 steps that are done" in refusal(run, config(num_steps=39), now)
    assert refusal(run, config(num_steps=40), now) == "", "its last evaluation and its model may be lacking"
    checkpoint(run, 1, 44).write_text("stat")
    assert "must be at least the 40 steps that are done" in refusal(run, config(num_steps=39), now) and refusal(run, config(num_steps=43), now) == ""
    (run.processes / str(os.getpid())).write_text(repr(psutil.Process().create_time()))
    assert "living processes; only what has ended can be resumed. Run: headway stop --drain" in refusal(run, config(), now)


def test_what_runs_on_another_machine_does_not_go_on_here(run: RunFolder) -> None:
    run.submitted.write_text(json.dumps({"cluster": "local", "complete": True, "host": "login1", "jobs": []}))
    assert refusal(run, config(), time.time()) == ""
    run.status.write_text("{}")
    assert "runs on login1; only what has ended can be resumed" in refusal(run, config(), time.time())
    assert state(run, {}) == "running"
    os.utime(run.status, (0, 0))
    assert refusal(run, config(), time.time()) == "" and state(run, {}) == "gone"


def test_what_is_complete_stays_so(run: RunFolder) -> None:
    run.end("", "test")
    assert "is complete; there is nothing to resume" in refusal(run, config(), time.time())


@pytest.mark.parametrize("cluster", ["slurm", "local"])
def test_training_time_that_is_used_up(run: RunFolder, cluster: str) -> None:
    run.submitted.write_text(json.dumps({"cluster": cluster, "complete": True, "arrays": [], "jobs": []}))
    incarnations.claim(run, "2_0", "5", 0, "trn0", 1, 0)
    later = time.time() + 3 * 3600
    assert refusal(run, config(max_hours=2.0), later) == "", "nobody has seen it train since"
    run.status.write_text(json.dumps({"time": later}))
    assert "run.max_hours=2: must be more than the 3.00 h that training has had" in refusal(run, config(max_hours=2.0), later)
    assert refusal(run, config(max_hours=4.0), later) == ""


def test_an_array_that_may_still_appear(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    array = {"role": "train", "name": "x-7", "job_id": None, "submitted": 1000.0}
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": True, "arrays": [array], "jobs": []}))
    monkeypatch.setattr(queries, "jobs_named", lambda name: [])
    assert "no clear answer for x-7, and SLURM may queue it yet. Try again in 200 s" in refusal(run, config(), 1100.0)
    assert refusal(run, config(), 1000.0 + UNANSWERED_S) == ""


@pytest.fixture
def resumable(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": True, "arrays": [], "jobs": []}))
    run.end("stopped: by the test", "test")
    monkeypatch.setattr(resume, "_plan", lambda run, config, console: (config, ()))
    return run


def test_of_two_that_resume_one_is_refused(resumable: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock is held until all is submitted, and left before watching."""
    console, full = Console(), config()
    full.cluster.kind = ClusterKind.slurm
    statuses: list[int] = []

    def start(*_: object) -> int:
        statuses.append(resume.resume(resumable, full, console))
        return 0

    def watch(run: RunFolder, *_: object) -> int:
        with lock(run, print) as mine:
            return 0 if mine else 1

    monkeypatch.setattr(resume, "_start", start)
    monkeypatch.setattr(resume, "_watch", watch)
    assert resume.resume(resumable, full, console) == 0 and statuses == [2]
    assert "another `headway resume` is under way" in capsys.readouterr().err


def test_the_step_that_is_said_is_one_that_training_goes_on_from(resumable: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest checkpoint is cut short, a bit of the one before is another."""
    monkeypatch.setattr(resume, "_start", lambda *_: 0)
    files = [checkpoint(resumable, 1, step) for step in (20, 24, 28)]
    files[2].write_text("stat")
    files[1].write_text("stete")
    full, console = config(), Console(record=True, width=200)
    assert resume.resume(resumable, full, console) == 0 and "goes on from the checkpoint of step 20" in console.export_text()
    files[0].write_text("")
    with pytest.raises(ConfigError, match="none of the 3 checkpoints in .* is whole"):
        resume.resume(resumable, full, console)


def test_what_another_has_resumed_meanwhile_is_refused(resumable: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["", "has 3 elements in the queue"]
    monkeypatch.setattr(resume, "refusal", lambda *_: answers.pop(0))
    assert resume.resume(resumable, config(), Console()) == 2 and answers == [] and resumable.ended() is not None


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(run: RunFolder, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(supervisor.fcntl, "flock", flock)
    said: list[str] = []
    for _ in range(2):
        with lock(run, said.append) as mine:
            assert mine
    (text,) = said
    assert os.strerror(number) in text and "Run one at a time" in text


def test_a_lock_is_held_by_one(run: RunFolder) -> None:
    with lock(run, print) as first, lock(run, print) as second:
        assert first and not second
    with pytest.raises(BlockingIOError), lock(run, print):
        raise BlockingIOError  # of what is done under the lock


def test_reopening_keeps_what_was(run: RunFolder) -> None:
    for number in (1, 2):
        run.end(f"ended {number}", "test")
        run.request_stop("by the test", drain=True)
        run.launcher_lock.touch()
        (run.rendezvous / "coordinator.000001.json").touch()
        reopen(run)
        assert run.ended() is None and run.stop_requested() is None and not run.launcher_is_gone() and not list(run.rendezvous.iterdir())
        assert json.loads((run.path / f"outcome.{number}.json").read_bytes())["cause"] == f"ended {number}"


def test_what_may_be_changed() -> None:
    assert changed(config(), ["run.num_steps=7", "run.max_hours=1.5"]).run.num_steps == 7
    warming = config(num_steps=100)
    warming.trainer.warmup_steps = 20
    assert changed(warming, ["run.num_steps=5"]).trainer.warmup_steps == 5, "a run may be ended while it warms up"
    assert changed(config(), ["selftest.action=warn"]).selftest.action is SelfTestAction.warn
    assert changed(config(), ["workflow.max_rejected=1"]).workflow.max_rejected == 1.0
    for change, words in (("trainer.lr=1", "cannot be changed when a run goes on"), ("run.num_steps=many", "not a number"),
                          ("selftest.action=maybe", "not one of auto, fail, warn, off"),
                          ("run.num_steps=0", "must be at least 1")):
        with pytest.raises(ConfigError, match=words):
            changed(config(), [change])


def test_a_device_that_its_jobs_do_not_have_is_refused_before_they_are_queued(run: RunFolder) -> None:
    full = config()
    full.cluster.kind, full.cluster.train.gpus, full.cluster.train.time, full.cluster.inference.time = ClusterKind.slurm, GpuRequest.none, "60", "60"
    with pytest.raises(ConfigError, match="trainer.device='cuda': its jobs ask for no GPUs"):
        resume._plan(run, changed(full, ["trainer.device=cuda"]), Console())


@pytest.mark.parametrize("error", [OSError(errno.EDQUOT, "Quota exceeded"), RunFolderError("run.dir=x: cannot be written to")])
def test_a_disk_that_is_still_full(
        run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    def full(*_: object) -> int:
        raise error

    monkeypatch.setattr(resume, "read_full", lambda _: config())
    monkeypatch.setattr(resume, "resume", full)
    assert resume.main([str(run.path)]) == 2
    assert "run.dir=" in capsys.readouterr().err


def test_where_jobs_run_may_be_changed_on_slurm() -> None:
    full = config()
    with pytest.raises(ConfigError, match="cannot be changed when a run goes on.*on SLURM, cluster.ROLE.KEY of partition"):
        changed(full, ["cluster.train.time=30"])
    full.cluster.kind, full.cluster.train.time, full.cluster.inference.time = ClusterKind.slurm, "60", "60"
    train = changed(full, ["cluster.train.time=30", "cluster.train.exclude=n1,n2", "cluster.train.cpus_per_gpu=4"]).cluster.train
    assert (train.time, train.exclude, train.cpus_per_gpu) == ("30", "n1,n2", 4)
    train = changed(full, ["cluster.train.python=/new/python", 'cluster.train.setup=["module load cuda/12.4", "export A=1,2"]']).cluster.train
    assert (train.python, train.setup) == ("/new/python", ["module load cuda/12.4", "export A=1,2"])
    full.cluster.train.gpu_memory_gb = 80.0
    for changes, size in ((["cluster.train.time=30"], 80), (["cluster.train.partition=other"], 0), (["cluster.train.gpu_type=a40"], 0),
                          (["cluster.inference.partition=other"], 80), (["cluster.train.partition=other", "cluster.train.gpu_memory_gb=48"], 48)):
        assert changed(full, changes).cluster.train.gpu_memory_gb == size, "of other GPUs nothing is known, unless it is said"
    for change, words in (("cluster.train.time=soon", "must be a time limit"), ("cluster.train.setup=module load x", "not a list of lines"),
                           ("cluster.train.cpus_per_gpu=x", "not a number"),
                          ("cluster.reward.time=5", "cannot be changed"), ("cluster.train.gpus=none", "cannot be changed"),
                          ("cluster.train=x", "cannot be changed"), ("cluster.train.time.x=5", "cannot be changed")):
        with pytest.raises(ConfigError, match=words):
            changed(full, [change])

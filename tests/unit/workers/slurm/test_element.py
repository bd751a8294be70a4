"""What an element knows of SLURM, asks of it, and does at its end. SLURM's commands are scripts on PATH that keep their arguments."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from workers.config import ClusterKind, Config, ConfigError
from workers.messages.parts import Version
from workers.run import checkpoints, incarnations, outage
from workers.run.folder import RunFolder
from workers.run.outage import OutageTooLong
from workers.run.retention import Retention
from workers.slurm import command as slurm_command
from workers.slurm import job as slurm
from workers.slurm import succession
from workers.slurm.command import PATIENCE_S, RETRY_S, SlurmError
from workers.slurm.element import follow_up as follow_up_element
from workers.slurm.job import EARLY_S, SlurmElement
from workers.slurm.signals import Signals
from workers.slurm.succession import cancellation, end, end_if_cancelled, is_followed
from workers.slurm.termination import Termination
from workers.trainer import beginning, worker
from workers.trainer.beginning import MAX_BACKOFF_S, Beginning
from workers.trainer.element import TrainElement
from workers.trainer.megatron.checkpoint.checkpoint import BrokenState, CheckpointError

ENVIRONMENT = {"SLURM_JOB_ID": "1236", "SLURM_PROCID": "3", "SLURM_ARRAY_JOB_ID": "1234", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "1",
               "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_END_TIME": "1900000000"}
AWAY = "slurm_load: Unable to contact slurm controller (connect failure)"
Command = Callable[..., Path]


class Clock:
    """Stands in for the module `time`: sleeping costs nothing."""

    def __init__(self) -> None:
        self.now, self.slept = 1000.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (slurm_command, beginning, succession):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Puts a command on PATH that answers as told (`fails_first` times with an error), and keeps its arguments, one call a line.
    squeue is there from the beginning, and shows nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def make(name: str, output: str = "", error: str = "", status: int = 0, fails_first: int = 0, away: str = AWAY) -> Path:
        calls, script = tmp_path / f"{name}.calls", folder / name
        (tmp_path / f"{name}.out").write_text(output)
        script.write_text(f"""#!/bin/bash
echo "$@" >>{calls}
if (( $(wc -l <{calls}) <= {fails_first} && {fails_first} > 0 )); then echo "{away}" >&2; exit 1; fi
cat {tmp_path / f"{name}.out"}
echo -n "{error}" >&2
exit {int(status)}
""")
        script.chmod(0o755)
        return calls

    make("squeue")
    return make


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    run.submitted.write_text("""{"cluster": "slurm", "complete": true, "arrays": [
        {"role": "inference", "job_id": "1200"}, {"role": "train", "job_id": "1234"}, {"role": "inference", "job_id": "1250"}]}""")
    return run


def make_config() -> Config:
    config = Config()
    config.cluster.kind, config.cluster.signal_delay_s = ClusterKind.slurm, 120
    return config


def make_element(end_time: float = 5000.0, job: str = "1236") -> SlurmElement:
    return SlurmElement(job, "1234_2", "1234", 0, 0, 1, 0, end_time)


# -- who it is -----------------------------------------------------------------------------------------------------------

def set_environment(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**ENVIRONMENT, **changes}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_an_element_of_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch)
    assert slurm.current() == SlurmElement("1236", "1234_2", "1234", 1, 3, 8, 1, 1900000000.0)


def test_a_job_that_is_no_array(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, SLURM_ARRAY_JOB_ID=None, SLURM_ARRAY_TASK_ID=None, SLURM_RESTART_COUNT=None, SLURM_NTASKS=None, SLURM_LOCALID=None)
    assert slurm.current() == SlurmElement("1236", "1236_0", "1236", 0, 3, 1, 0, 1900000000.0)


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_PROCID"])
def test_outside_a_job_step_it_says_so(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    set_environment(monkeypatch, **{name: None})
    with pytest.raises(ConfigError, match="in no SLURM job step"):
        slurm.current()


@pytest.mark.parametrize(("answer", "end_time"), [
    ("2026-11-21T15:54:05\n", datetime(2026, 11, 21, 15, 54, 5).timestamp()), ("N/A\n", float("inf")), ("", float("inf"))])
def test_an_old_slurm_is_asked_for_the_time_limit(monkeypatch: pytest.MonkeyPatch, command: Command, answer: str, end_time: float) -> None:
    set_environment(monkeypatch, SLURM_JOB_END_TIME=None)
    calls = command("squeue", answer)
    assert slurm.current().end_time == end_time
    assert "-j 1236" in calls.read_text()


def test_a_signal_close_to_the_time_limit_announces_it() -> None:
    element = make_element(end_time=5000.0)
    assert element.is_walltime(4999.0, 120) and element.is_walltime(5000 - 120 - EARLY_S, 120)
    assert not element.is_walltime(5000 - 120 - EARLY_S - 1, 120)
    assert not make_element(end_time=float("inf")).is_walltime(1e12, 120), "without a limit it can only be a preemption"


# -- what it asks --------------------------------------------------------------------------------------------------------

def test_commands_name_what_they_are_for(command: Command) -> None:
    control, cancel = command("scontrol"), command("scancel")
    slurm.requeue("1236")
    slurm.requeue_held("1236")
    slurm.hold("1200")
    slurm.release("1200")
    slurm.cancel_waiting(["1200", "1234"])
    assert control.read_text().splitlines() == ["requeue 1236", "requeuehold 1236", "hold 1200", "release 1200"]
    assert cancel.read_text().splitlines() == ["--state=PENDING 1200", "--state=PENDING 1234"]


def test_without_arrays_nothing_is_asked(tmp_path: Path, command: Command) -> None:
    calls = [command("scancel"), command("squeue")]
    slurm.cancel_waiting([])  # without ids it would cancel everything of this user
    assert slurm.states([]) == slurm.job_states([]) == {}
    assert not any(path.exists() for path in calls)


def test_states(command: Command) -> None:
    calls = command("squeue", "1234_2 RUNNING\n1234_[3-9%1] PENDING\n")
    assert slurm.states(["1234", "1250"]) == {"1234_2": "RUNNING", "1234_[3-9%1]": "PENDING"}
    assert slurm.job_states(["1234"]) == {"1234_2": "RUNNING", "1234_[3-9%1]": "PENDING"}
    assert calls.read_text().splitlines() == ["-h -j 1234,1250 -o %F_%K %T", "-h --array -j 1234 -o %A %T"]


def test_an_array_that_has_left_the_queue_has_no_states(command: Command) -> None:
    command("squeue", error="slurm_load_jobs error: Invalid job id specified", status=1)
    assert slurm.states(["1234"]) == {}


def test_arrays_that_have_ended_are_cancelled_in_peace(command: Command) -> None:
    calls = command("scancel", error="scancel: error: Kill job error on job id 1200: Job/step already completing or completed", status=1)
    slurm.cancel_waiting(["1200", "1234"])
    assert calls.read_text().splitlines() == ["--state=PENDING 1200", "--state=PENDING 1234"]


def shown(state: str, preempt: str) -> str:
    """As `squeue -O JobID,State,PreemptTime` shows all of an array whose number is that of its last element."""
    rows = [("1237", "PENDING", "N/A"), ("1235", "RUNNING", "2026-11-21T15:00:00"), ("1236", state, preempt)]
    return "".join(f"{job:20}{now:20}{when:30}\n" for job, now, when in rows)


@pytest.mark.parametrize(("state", "preempt", "preempted"), [
    ("RUNNING", "2026-11-21T15:54:05", True), ("RUNNING", "N/A", False), ("RUNNING", "Unknown", False),
    ("COMPLETING", "2026-11-21T15:54:05", False), ("CANCELLED", "None", False)])
def test_what_slurm_says_of_a_preemption(command: Command, state: str, preempt: str, preempted: bool) -> None:
    command("squeue", shown(state, preempt))
    assert slurm.is_being_preempted("1236") is preempted


@pytest.mark.parametrize(("number", "at", "preempt", "back"), [
    (signal.SIGUSR2, 1000.0, "N/A", True), (signal.SIGUSR2, 4990.0, "N/A", False), (signal.SIGUSR2, 4990.0, "2026-11-21T15:54:05", True),
    (signal.SIGTERM, 1000.0, "N/A", False), (signal.SIGTERM, 1000.0, "2026-11-21T15:54:05", True)])
def test_which_elements_put_themselves_back(command: Command, number: signal.Signals, at: float, preempt: str, back: bool) -> None:
    command("squeue", shown("RUNNING", preempt))
    assert slurm.is_to_come_back(make_element(end_time=5000.0), number, at, 120) is back


@pytest.mark.parametrize(("number", "back"), [(signal.SIGUSR2, True), (signal.SIGTERM, False)])
def test_where_slurm_does_not_say_the_time_of_the_signal_decides(command: Command, number: signal.Signals, back: bool) -> None:
    command("squeue", error="slurm is confused", status=1)
    assert slurm.is_to_come_back(make_element(end_time=5000.0), number, 1000.0, 120) is back


@pytest.mark.parametrize("act", [slurm.requeue, slurm.requeue_held, slurm.hold, slurm.release])
def test_what_an_element_asks_for_is_asked_again_while_the_controller_is_away(command: Command, clock: Clock, act: Callable[[str], None]) -> None:
    calls = command("scontrol", fails_first=3, away="Unexpected message received for job 1236")
    act("1236")
    assert len(calls.read_text().splitlines()) == 4


def test_releasing_where_an_element_has_ended_is_no_error(command: Command) -> None:
    calls = command("scontrol", error="Job has already finished", status=1)
    slurm.release("1200")
    assert calls.read_text() == "release 1200\n"


def test_a_refusal_is_said_at_once_with_slurms_words(command: Command, clock: Clock) -> None:
    calls = command("scontrol", error="Requested operation is presently disabled", status=1)
    with pytest.raises(SlurmError, match=r"^scontrol requeue 1236: exit status 1: Requested operation is presently disabled$"):
        slurm.requeue("1236")
    assert len(calls.read_text().splitlines()) == 1 and clock.slept == 0


def test_a_controller_that_is_away_is_waited_for(command: Command, clock: Clock) -> None:
    calls = command("squeue", "1234_2 RUNNING\n", fails_first=3)
    assert slurm.states(["1234"]) == {"1234_2": "RUNNING"}
    assert len(calls.read_text().splitlines()) == 4


def test_a_controller_that_stays_away_is_given_up(command: Command, clock: Clock) -> None:
    command("squeue", fails_first=1000)
    with pytest.raises(SlurmError, match="Unable to contact slurm controller"):
        slurm.states(["1234"])
    assert PATIENCE_S <= clock.slept <= PATIENCE_S + 2 * RETRY_S


def test_a_command_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match="squeue: not found on PATH"):
        slurm.states(["1234"])


# -- how an inference element ends ---------------------------------------------------------------------------------------

def follow_up(run: RunFolder, ending: Termination, element: SlurmElement) -> None:
    follow_up_element(run, make_config(), element, "inference", ending)


def told(number: signal.Signals) -> Termination:
    return Termination("drained", f"told by {number.name}", number)


def test_an_idle_element_waits_in_the_queue_with_all_others(run: RunFolder, command: Command) -> None:
    calls = command("scontrol")
    command("squeue", "1299 PENDING\n")
    follow_up(run, Termination("idle", "no coordinator"), make_element())
    assert run.ended() is None and calls.read_text().splitlines() == ["hold 1200", "hold 1250", "requeuehold 1236"]


def test_an_idle_element_that_no_training_could_release_ends_the_run(run: RunFolder, command: Command) -> None:
    control, cancel = command("scontrol"), command("scancel")
    command("sacct", error="Slurm accounting storage is disabled", status=1)
    crash(run, 1)
    follow_up(run, Termination("idle", "no coordinator"), make_element())
    outcome = run.ended()
    assert outcome is not None and outcome["state"] == "failed" and "crashed: no memory" in outcome["cause"] and not control.exists()
    assert cancel.read_text().splitlines() == ["--state=PENDING 1234", "--state=PENDING 1200", "--state=PENDING 1250"]


def test_training_that_ended_in_order_leaves_a_run_that_can_be_resumed(run: RunFolder, command: Command) -> None:
    command("scancel")
    command("sacct")
    crash(run, 1, "walltime")
    save(run, Version(1, 4))
    follow_up(run, Termination("idle", "no coordinator"), make_element())
    assert (run.ended() or {})["state"] == "drained"


@pytest.mark.parametrize("followed", ["", "a watch", "SLURM is away"])
def test_who_follows(run: RunFolder, command: Command, followed: str) -> None:
    command("squeue", "1236 RUNNING\n1235 COMPLETING\n", error="slurm is confused" if "away" in followed else "", status="away" in followed)
    with run.supervisor_lock.open("w") as file:
        if "watch" in followed:
            fcntl.flock(file, fcntl.LOCK_EX)
        assert is_followed(run, "1236") == bool(followed)
    assert is_followed(run), "another one that runs"


@pytest.mark.parametrize(("accounts", "waiting", "words"), [
    ("2026-11-25T23:49:47|CANCELLED by 0\n2026-11-25T23:49:40|FAILED\n", "", "cancelled by root (scancel)"),
    ("2026-11-25T23:49:47|FAILED\n2026-11-25T23:49:40|CANCELLED by 0\n", "", ""),
    ("2026-11-25T23:49:47|NODE_FAIL\nUnknown|RUNNING\n", "", ""),
    ("2026-11-25T23:49:47|CANCELLED by 4000000000\n", "", "cancelled by user 4000000000"),
    (None, "1237\n", "cancelled by somebody"), (None, "", "")])
def test_who_has_cancelled_training(run: RunFolder, command: Command, accounts: str | None, waiting: str, words: str) -> None:
    command("sacct", accounts or "", error="" if accounts else "Slurm accounting storage is disabled", status=not accounts)
    command("squeue", waiting)
    assert (words in cancellation(run)) if words else not cancellation(run)


def test_whoever_cancels_training_ends_the_run_in_order(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue", "1236 COMPLETING\n")
    command("sacct", "2026-11-25T23:49:47|CANCELLED by 0\n")
    cancel = command("scancel")
    trainer.epoch = incarnations.claim(trainer.run, "1234_2", "1236", 0, "node", 1, 0)
    save(trainer.run, Version(1, 4))
    end_if_cancelled(trainer.run, "trainer", "1236")
    outcome = trainer.run.ended()
    assert outcome is not None and outcome["state"] == "drained" and outcome["cause"] == "stopped: training was cancelled by root (scancel)"
    assert "--state=PENDING 1200" in cancel.read_text()


def test_one_element_that_is_cancelled_is_followed_by_the_next(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue", "1236 COMPLETING\n1237 PENDING\n")
    command("sacct", "2026-11-25T23:49:47|CANCELLED by 0\n")
    end_if_cancelled(trainer.run, "trainer", "1236")
    assert trainer.run.ended() is None


def test_where_the_run_folder_is_gone_arrays_are_found_by_their_names(run: RunFolder, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(run.path)
    monkeypatch.setenv("SLURM_JOB_NAME", "my-run-12345678-train-2")
    command("squeue", "1200 my-run-12345678-inference-1\n1234 my-run-12345678-train-1\n1300 my-run-99999999-train-1\n1234 my-run-12345678-train-1\n")
    assert slurm.arrays(run, "train") == ["1234"] and slurm.arrays(run, "inference") == ["1200"] and slurm.arrays(run, "reward") == []
    cancel, control = command("scancel"), command("scontrol")
    monkeypatch.setenv("SLURM_JOB_ID", "1236")
    command("sacct")
    end(run, "inference")
    assert "--state=PENDING 1200" in cancel.read_text() and "JobId=1236 Comment=headway: the run has ended" in control.read_text()


def test_elements_that_could_write_nothing_down_are_counted_by_slurm(trainer: TrainElement, command: Command, clock: Clock) -> None:
    crash(trainer.run, 1)
    command("squeue", "1236 RUNNING\n")
    command("sacct", "1235|FAILED\n1237|FAILED\n1238|NODE_FAIL\n1239|COMPLETED\n1236|RUNNING\n")
    assert trainer._may_begin(make_element()) and 40 <= clock.slept < 41, "one crash on record, two that are not"


@pytest.mark.parametrize(("job", "slept"), [("1236", 0.0), ("1235", beginning.PREDECESSOR_S)])
def test_only_another_element_is_waited_for(trainer: TrainElement, command: Command, clock: Clock, job: str, slept: float) -> None:
    """SLURM starts a job anew under its own number; who had it before was killed."""
    trainer.epoch = incarnations.claim(trainer.run, "1234_2", job, 0, "node", 1, 0)
    command("squeue", f"{job} RUNNING\n")
    Beginning(trainer.run, trainer.config, "1236", trainer.signals, lambda: 0, trainer._give_up)._wait_for_predecessor()
    assert slept <= clock.slept < slept + 2


def test_a_checkpoint_that_ranks_have_found_broken_is_put_aside_at_once(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads it again: the other ranks are leaving, and this process is ended with them."""
    incarnations.claim(run, "", "", 0, "node", 1, 0)
    before, broken = save(run, Version(1, 4)), save(run, Version(1, 5))
    left = [BrokenState("is broken, __0_0.distcp does not have the digest"), CheckpointError("is the state of another model")]
    monkeypatch.setattr(worker, "TrainerWorker", lambda *_: (_ for _ in ()).throw(left.pop()))
    trainer = TrainElement(run, make_config(), None, Signals())
    for expected, newest in ((CheckpointError, broken), (BrokenState, before)):
        with pytest.raises(expected):
            trainer._train(None, broken)  # type: ignore[arg-type]
        assert checkpoints.newest(run) == newest


def test_an_element_whose_run_folder_stays_away_releases_all_others(trainer: TrainElement, command: Command, clock: Clock,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to fail in a second, and every one after it."""
    command("squeue", "1236 RUNNING\n1237 PENDING\n")
    command("sacct")
    cancel, control = command("scancel"), command("scontrol")

    def away(*_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpoints, "all_checkpoints", away)
    monkeypatch.setattr(incarnations, "history", lambda _: [])
    monkeypatch.setattr(RunFolder, "write_last", away)
    monkeypatch.setattr(outage, "time", clock)
    monkeypatch.setenv("SLURM_JOB_ID", "1236")
    trainer.run = trainer.run.patient(2.0)
    with pytest.raises(OutageTooLong, match="cannot be reached .Stale file handle., and that for 12. s .run.outage_minutes"):
        trainer.live()
    assert 120 <= clock.slept < 125 and "--state=PENDING 1234" in cancel.read_text() and "--state=PENDING 1200" in cancel.read_text()
    waits, over = control.read_text().splitlines()
    assert "Comment=headway: run.dir=" in waits and "Waiting for it, 120 s at most" in waits and "the run has ended, not on record" in over


@pytest.mark.parametrize(("ending", "end_time", "asked"), [
    (told(signal.SIGUSR2), 1e12, ["requeue 1236"]),  # preempted
    (told(signal.SIGUSR2), 0.0, []),  # time limit: the array's next element follows
    (Termination("finished", ""), 1e12, []),
    (Termination("drained", "stop --drain"), 1e12, []),
])
def test_only_a_preempted_element_is_put_back(run: RunFolder, command: Command, ending: Termination, end_time: float, asked: list[str]) -> None:
    calls = command("scontrol")
    follow_up(run, ending, make_element(end_time))
    assert (calls.read_text().splitlines() if calls.exists() else []) == asked


def test_a_terminated_element_fails_so_that_slurm_decides(run: RunFolder, command: Command) -> None:
    calls = command("scontrol")
    with pytest.raises(SystemExit) as caught:
        follow_up(run, told(signal.SIGTERM), make_element(1e12))
    assert caught.value.code == 1 and not calls.exists()


# -- how a training element begins and ends ------------------------------------------------------------------------------

@pytest.fixture
def trainer(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> TrainElement:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handlers stay as they are
    return TrainElement(run, make_config(), make_element(), Signals())


@pytest.mark.parametrize(("received", "at", "why"), [
    (None, 0.0, "drained"), (signal.SIGUSR2, 4990.0, "walltime"), (signal.SIGUSR2, 1000.0, "preempted"), (signal.SIGTERM, 4990.0, "terminated"),
    (signal.SIGTERM, 1000.0, "terminated")])
def test_what_a_signal_meant(trainer: TrainElement, command: Command, received: signal.Signals | None, at: float, why: str) -> None:
    command("squeue", shown("RUNNING", "N/A"))
    trainer.signals.received, trainer.signals.at = received, at
    assert trainer._why_drained() == why


@pytest.mark.parametrize("received", [signal.SIGUSR2, signal.SIGTERM])
def test_a_preemption_is_one_whatever_the_signal_and_the_time(trainer: TrainElement, command: Command, received: signal.Signals) -> None:
    command("squeue", shown("RUNNING", "2026-11-21T15:54:05"))
    trainer.signals.received, trainer.signals.at = received, 4990.0
    assert trainer._why_drained() == "preempted"


def test_a_stop_that_was_asked_for_comes_first(trainer: TrainElement) -> None:
    trainer.signals.received = signal.SIGUSR2
    trainer.run.request_stop("pause", drain=True)
    assert trainer._why_drained() == "drained"


@pytest.mark.parametrize(("how", "cause", "asked", "status"), [
    ("preempted", "", ["requeue 1236"], None), ("walltime", "", [], None), ("finished", "", [], None), ("drained", "stop", [], None),
    ("fenced", "epoch 9 has begun", [], None), ("terminated", "", [], 1), ("stopped", "stopped: enough", [], 1), ("stopped", "", [], None)])
def test_what_follows_an_end(trainer: TrainElement, command: Command, how: str, cause: str, asked: list[str], status: int | None) -> None:
    calls = command("scontrol")
    if status is None:
        assert trainer._follow_up(how, cause) == ""
    else:
        with pytest.raises(SystemExit) as caught:
            trainer._follow_up(how, cause)
        assert caught.value.code == status
    assert (calls.read_text().splitlines() if calls.exists() else []) == asked


def test_an_orderly_stop_is_no_error(trainer: TrainElement) -> None:
    trainer.run.request_stop("stopped by headway stop", drain=False)
    assert trainer._follow_up("stopped", "stopped by headway stop") == ""


def crash(run: RunFolder, times: int, how: str = "crashed") -> None:
    for _ in range(times):
        epoch = incarnations.claim(run, "1234_1", "1235", 0, "node", 1, 0)
        incarnations.record_end(run, epoch, how, "no memory", 0, -1)


@pytest.mark.parametrize(("crashes", "pause"), [(0, 0), (1, 10), (2, 20)])
def test_a_crash_is_followed_by_a_pause_that_doubles(trainer: TrainElement, command: Command, clock: Clock, crashes: int, pause: float) -> None:
    command("squeue", "1236 RUNNING\n")
    crash(trainer.run, crashes)
    assert trainer._may_begin(make_element()) and pause <= clock.slept < pause + 1


def test_the_pause_has_a_limit_and_ends_early_on_a_signal(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue")
    trainer.config.cluster.max_consecutive_crashes = 100
    crash(trainer.run, 20)
    assert trainer._may_begin(make_element()) and MAX_BACKOFF_S <= clock.slept < MAX_BACKOFF_S + 1
    trainer.signals.received = signal.SIGTERM
    clock.slept = 0.0
    assert not trainer._may_begin(make_element()) and clock.slept == 0, "told to go before it has begun"


def test_too_many_crashes_end_the_run_with_the_last_cause(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue")
    cancel = command("scancel")
    crash(trainer.run, 3)
    assert not trainer._may_begin(make_element())
    outcome = trainer.run.ended()
    assert outcome is not None and "3 times in a row" in outcome["cause"] and "no memory" in outcome["cause"]
    assert cancel.read_text().splitlines() == ["--state=PENDING 1234", "--state=PENDING 1200", "--state=PENDING 1250"]


def test_killed_elements_that_slurm_starts_again_are_no_crashes(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue", "1235 PENDING\n1236 RUNNING\n")
    for _ in range(3):
        incarnations.claim(trainer.run, "1234_1", "1235", 0, "node", 1, 0)
    assert trainer._may_begin(make_element()) and clock.slept == 0 and trainer.run.ended() is None


def test_a_slurm_that_does_not_answer_stops_no_training(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue", error="slurm is confused", status=1)
    assert trainer._may_begin(make_element())


def test_a_run_that_has_ended_is_not_begun(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue")
    trainer.run.end("", "someone")
    assert not trainer._may_begin(make_element())


def save(run: RunFolder, version: Version, keep: int = 2) -> checkpoints.Checkpoint:
    folder = checkpoints.begin(run, version)
    (folder / checkpoints.COORDINATOR).write_text("state")
    return checkpoints.commit(run, folder, version, Retention(keep))


def test_a_crash_is_put_on_record_and_the_last_one_ends_the_run_at_once(trainer: TrainElement, command: Command) -> None:
    cancel = command("scancel")
    crash(trainer.run, 1)
    trainer.epoch = incarnations.claim(trainer.run, "1234_2", "1236", 0, "node", 1, 0)
    trainer._crashed("loss is not finite")
    end = incarnations.history(trainer.run)[-1].end
    assert end is not None and (end.how, end.cause) == ("crashed", "loss is not finite") and trainer.run.ended() is None
    crash(trainer.run, 1)
    trainer.epoch = incarnations.claim(trainer.run, "1234_2", "1236", 0, "node", 1, 0)
    trainer._crashed("loss is not finite again")
    outcome = trainer.run.ended()
    assert outcome is not None and outcome["cause"].endswith("loss is not finite again")
    assert cancel.read_text().splitlines() == ["--state=PENDING 1234", "--state=PENDING 1200", "--state=PENDING 1250"]


def test_a_crash_after_a_new_checkpoint_is_the_first_in_its_row(trainer: TrainElement, command: Command) -> None:
    crash(trainer.run, 2)
    trainer.epoch = incarnations.claim(trainer.run, "1234_2", "1236", 0, "node", 1, 0)
    save(trainer.run, Version(trainer.epoch, 4))
    trainer._crashed("loss is not finite")
    assert trainer.run.ended() is None


def test_whoever_was_fenced_off_has_not_crashed(trainer: TrainElement) -> None:
    trainer.epoch = incarnations.claim(trainer.run, "1234_2", "1236", 0, "node", 1, 0)
    incarnations.claim(trainer.run, "1234_3", "1237", 0, "node", 1, 0)
    trainer._crashed("the coordinator has gone")
    end = incarnations.history(trainer.run)[0].end
    assert end is not None and end.how == "fenced"


def test_an_element_goes_on_from_the_newest_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    first = TrainElement(run, make_config(), make_element(), Signals())
    first._begin()
    assert first.step == 0 and first.restored is None and first.epoch == 1
    save(run, Version(1, 4))
    second = TrainElement(run, make_config(), make_element(), Signals())
    second._begin()
    assert second.step == 4 and second.restored is not None and second.restored.version == Version(1, 4)
    assert second.epoch == 2 and incarnations.history(run)[-1].claim.step == 4


def test_the_claim_says_the_step_of_a_checkpoint_that_is_whole(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    incarnations.claim(run, "", "", 0, "node", 1, 0)
    for step, content in ((20, "state"), (24, "stete"), (28, "stat")):
        save(run, Version(1, step), keep=3)
        (run.checkpoints / f"1.{step}" / checkpoints.COORDINATOR).write_text(content)
    crash(run, 1)
    begun = TrainElement(run, make_config(), make_element(), Signals())
    assert begun._saved_step() == 20
    begun._begin()
    assert begun.step == 20 and incarnations.history(run)[-1].claim.step == 20
    begun._crashed("no memory")
    end = incarnations.history(run)[-1].end
    assert end is not None and end.checkpoint == 20, "nothing has been saved that could be gone on from"


def test_a_checkpoint_that_is_published_while_the_epoch_is_claimed_is_gone_on_from(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    incarnations.claim(run, "", "", 0, "node", 1, 0)
    save(run, Version(1, 4))
    claim = incarnations.claim

    def claim_late(*arguments: Any) -> int:
        save(run, Version(1, 8))
        return claim(*arguments)

    monkeypatch.setattr(incarnations, "claim", claim_late)
    begun = TrainElement(run, make_config(), make_element(), Signals())
    begun._begin()
    assert begun.step == 8 and incarnations.history(run)[-1].claim.step == 8


def test_where_no_checkpoint_is_whole_nothing_begins_from_the_beginning(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    incarnations.claim(run, "", "", 0, "node", 1, 0)
    save(run, Version(1, 4))
    for path in run.checkpoints.rglob("*.msgpack"):
        path.write_bytes(b"")
    begun = TrainElement(run, make_config(), make_element(), Signals())
    with pytest.raises(SystemExit):
        begun._begin()
    end = incarnations.history(run)[-1].end
    assert end is not None and end.how == "crashed" and "none of the 1 checkpoints" in end.cause


def test_what_crashed_before_a_resume_does_not_count(trainer: TrainElement, command: Command, clock: Clock) -> None:
    command("squeue")
    crash(trainer.run, 3)
    (trainer.run.path / "outcome.1.json").write_text(json.dumps({"time": time.time()}))
    assert trainer._may_begin(make_element()) and clock.slept == 0

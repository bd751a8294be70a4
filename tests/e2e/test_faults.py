"""Killing any process of a run ends all the others within seconds, with the cause on record, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest

from launcher.jobs.liveness import submitted_jobs
from launcher.monitoring.stop import stop
from tests.e2e.runs import END_S, START_S, headway, live_run, wait_for
from tests.support.processes import said
from workers.coordinator.process.replay_run import audit
from workers.run.files import read_lines

ENDLESS = ("run.num_steps=1000000", "data.num_heldout=4", "evaluation.every_steps=0", "transport.reconnect_grace_s=1", "engine.max_restarts=0")
NO_MODEL = ("engine.server=synthetic", "selftest.action=off")
"""The engine starts in a moment: how processes end does not depend on what they compute."""


@pytest.mark.parametrize(("victim", "words"), [
    ("launcher", "launcher has died"),
    pytest.param("inference controller", "rollout 0", marks=pytest.mark.long),  # as the other one, below
    pytest.param("inference task", "rollout 0", marks=pytest.mark.long),  # as in test_evaluation
    ("engine", "killed by SIGKILL"),
    ("coordinator", "killed by SIGKILL"),
    pytest.param("train task", "trainer", marks=pytest.mark.long),  # as in test_local_gang
    ("train controller", "trainer"),
])
def test_killing_one_process_ends_the_run(tmp_path: Path, victim: str, words: str) -> None:
    with live_run(tmp_path / "run", *ENDLESS, *NO_MODEL) as run:
        run.after_steps(2).process(victim).kill()
        outcome = wait_for("the outcome", run.run.ended, END_S)
        assert outcome["state"] == "failed" and words in outcome["cause"]
        run.assert_nothing_left()
        if victim != "launcher":
            assert run.launcher.returncode == 1
            assert words in run.output.read_text()
        if victim == "coordinator":
            assert f"report {run.run.report}" in run.output.read_text(), "the launcher's"
            assert "failed" in run.run.report.read_text() and not run.run.summary.exists()
            told = audit(run.run)  # by another process than the one that was killed
            assert told.sound and told.incarnations == [1] and told.replay.num_points >= 1 and told.replay.num_inputs > 20


def test_a_killed_verifier_and_a_killed_engine_are_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *ENDLESS, "engine.max_restarts=3") as run:
        run.after_steps(1).process("reward").kill()
        run.after_steps(6).process("engine").kill()
        wait_for("word of its restart", lambda: any(record["engine_restarts"] for record in read_lines(run.run.metrics)), START_S)
        run.after_steps(len(read_lines(run.run.metrics)) + 4)
        status = json.loads(run.run.status.read_bytes())
        assert [worker["restarts"] for worker in status["workers"] if worker["name"] == "rollout 0"] == [1]
        assert run.run.ended() is None and "stopped" in stop(run.run, "by the test")
        run.assert_nothing_left()


def test_an_interrupt_from_the_terminal_ends_the_run_in_order(tmp_path: Path) -> None:
    """SIGTERM to the launcher: test_local_gang."""
    with live_run(tmp_path / "run", *ENDLESS, *NO_MODEL) as run:
        run.after_steps(1)
        os.killpg(run.launcher.pid, signal.SIGINT)  # to every process of the foreground group
        run.assert_nothing_left()
        assert (run.run.ended() or {})["cause"] == "stopped: by Ctrl-C"
        assert run.run.summary.exists() and run.launcher.returncode == 1


def test_a_signal_during_start_up_leaves_nothing(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *ENDLESS) as run:
        wait_for("submission", run.run.submitted.exists, END_S)
        run.look()
        run.launcher.send_signal(signal.SIGTERM)
        run.assert_nothing_left()
        assert run.run.ended() is not None


def test_a_detached_run_outlives_the_launcher_and_can_be_asked_and_stopped(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with live_run(path, *ENDLESS, *NO_MODEL, "launch.detach=true") as run:
        assert run.launcher.wait(END_S) == 0, run.output.read_text()
        wait_for("a training step", run.run.metrics.exists, START_S)
        controllers = [psutil.Process(int(job["job_id"])) for job in submitted_jobs(run.run)]
        held = {file.path for controller in controllers for process in (controller, *controller.children(recursive=True))
                for file in said(process.open_files, [])}
        assert held and str(run.output) not in held, "whoever waits for the end of the command's output waits for the run"
        status = headway("status", str(path))
        assert status.returncode == 0 and "rollout 0" in status.stdout and "trainer 0" in status.stdout
        stopped = headway("stop", str(path))
        assert stopped.returncode == 0 and "stopped" in stopped.stdout
        assert "stopped" in (run.run.ended() or {})["cause"]
        run.assert_nothing_left()
        assert headway("status", str(path)).returncode == 1
        assert "had ended already" in headway("stop", str(path)).stdout

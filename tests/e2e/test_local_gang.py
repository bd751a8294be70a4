"""Runs on this machine whose training has several ranks: they train together, and none outlives another."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from tests.e2e.runs import END_S, START_S, LiveRun, live_run, wait_for
from tests.e2e.test_faults import NO_MODEL
from tests.support.processes import command_line
from workers.model.architecture import read_architecture
from workers.model.tensors import check_tensors
from workers.run.files import read_lines

TWO_RANKS = ("allocation.num_devices=3", "allocation.inference_fraction=0.34", "evaluation.every_steps=0")
ENDLESS = ("run.num_steps=1000000", "data.num_heldout=4", "transport.reconnect_grace_s=1")


def rank(run: LiveRun, number: int) -> psutil.Process:
    found = [process for process in run.look() if "workers.trainer.local_ranks" in command_line(process)]
    return next(process for process in found if command_line(process)[-4:-3] == [str(number)])


@pytest.mark.long  # that they train alike: tests/wire/workers/trainer/test_gang_run.py; that they train in such a run: below
@pytest.mark.parametrize("layout", ["trainer.parallel.dp=2", "trainer.parallel.tp=2"])
def test_two_ranks_train_a_model(tmp_path: Path, layout: str) -> None:
    with live_run(tmp_path / "run", *TWO_RANKS, layout, "run.num_steps=4", "checkpoint.every_steps=2") as run:
        run.after_steps(1)
        assert rank(run, 1).parent() == run.process("train task")
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        run.assert_nothing_left()
        summary, steps = json.loads(run.run.summary.read_bytes()), read_lines(run.run.metrics)
    assert summary["state"] == "finished" and len(steps) == 4 and list(run.run.checkpoints.iterdir())
    before, after = (load_file(check_tensors(folder, read_architecture(folder))[0]) for folder in (run.run.model, run.run.final_model))
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)
    assert "2 for training" in run.output.read_text() and "a training rank takes about" in run.output.read_text()


@pytest.mark.parametrize(("victim", "words"), [(1, "training rank 1 "), pytest.param(0, "trainer", marks=pytest.mark.long)])
def test_killing_a_rank_ends_the_run(tmp_path: Path, victim: int, words: str) -> None:
    with live_run(tmp_path / "run", *TWO_RANKS, *ENDLESS, *NO_MODEL) as run:
        run.after_steps(1)
        (rank(run, victim) if victim else run.process("train task")).kill()
        outcome = wait_for("the outcome", run.run.ended, END_S)
        assert outcome["state"] == "failed" and words in outcome["cause"] and (not victim or "was killed by SIGKILL" in outcome["cause"])
        run.assert_nothing_left()


@pytest.mark.long  # of one rank: test_faults; an end in order of two: test_supervised
def test_a_signal_to_the_launcher_ends_all_ranks_in_order(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *TWO_RANKS, *ENDLESS, "trainer.parallel.tp=2") as run:
        run.after_steps(1)
        run.launcher.send_signal(signal.SIGTERM)
        run.assert_nothing_left()
        assert "SIGTERM" in (run.run.ended() or {})["cause"]
        assert run.run.summary.exists() and run.launcher.returncode == 1

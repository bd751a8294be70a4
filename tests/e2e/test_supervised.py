"""Supervised runs by the command: the loss falls, the model is exported, and a run that was drained goes on exactly where it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.jobs.liveness import still_there
from tests.e2e.runs import headway, live_run
from workers.coordinator.process.replay_run import audit
from workers.model.architecture import read_architecture
from workers.model.tensors import check_tensors
from workers.run.files import read_lines
from workers.run.folder import RunFolder

SFT = ("--plain", "experiment=sft_tiny")


def consumed(run: RunFolder) -> list[int]:
    return [index for line in read_lines(run.consumed) for index in line["groups"]]


@pytest.mark.long  # but for what it says, the run below comes to the same
def test_a_supervised_run_from_the_command_to_the_exported_model(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    done = headway(*SFT, f"run.dir={run.path}", "run.num_steps=20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 for training, none for inference" in done.stdout and "held-out loss after step 20" in done.stdout
    steps, heldout = read_lines(run.metrics), read_lines(run.evaluations)
    assert [step["step"] for step in steps] == list(range(1, 21)) and consumed(run) == list(range(20 * 32))
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert [line["step"] for line in heldout] == [0, 10, 20] and heldout[-1]["heldout_loss"] < 0.5 * heldout[0]["heldout_loss"]
    summary = json.loads(run.summary.read_bytes())
    assert (summary["heldout_before"], summary["heldout_after"]) == (heldout[0]["heldout_loss"], heldout[-1]["heldout_loss"])
    assert [job["name"] for job in run.submission()["jobs"]] == ["sft_tiny-train"] and not still_there(run)


def test_a_drained_supervised_run_of_two_ranks_goes_on(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", "run.num_steps=100000", "allocation.num_devices=2", "evaluation.every_steps=7", experiment="sft_tiny") as live:
        run = live.after_steps(10).run
        assert headway("stop", "--drain", str(run.path)).returncode == 0
        assert (run.ended() or {})["state"] == "drained", run.ended()
        live.assert_nothing_left()
    first = len(read_lines(run.metrics))
    done = headway("resume", "--plain", str(run.path), f"run.num_steps={first + 10}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"goes on from the checkpoint of step {first}" in done.stdout
    steps, heldout = read_lines(run.metrics), read_lines(run.evaluations)
    assert [step["step"] for step in steps] == list(range(1, first + 11)) and consumed(run) == list(range(32 * (first + 10)))
    assert [line["step"] for line in heldout] == sorted({*range(0, first + 11, 7), first + 10})
    assert heldout[-1]["heldout_loss"] < 0.7 * heldout[0]["heldout_loss"]
    check_tensors(run.final_model, read_architecture(run.final_model))
    transformers = pytest.importorskip("transformers")
    assert transformers.AutoModelForCausalLM.from_pretrained(run.final_model).num_parameters() > 0
    assert steps[-1]["loss"] < steps[0]["loss"] and json.loads(run.summary.read_bytes())["num_incarnations"] == 2
    told = audit(run)
    assert told.sound and not told.replay.notes and told.incarnations == [1, 2] and told.replay.num_points > 2, told

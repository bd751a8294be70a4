"""Whole runs of the tiny experiment: a model made on the spot learns by the same asynchronous pipeline as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.e2e.runs import live_run
from workers.files import read_lines
from workers.weights.architecture import check_tensors, read_architecture


def test_the_tiny_model_learns_asynchronously(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", "evaluation.every_steps=20") as run:
        assert run.launcher.wait(250) == 0, run.output.read_text()
        run.assert_nothing_left()
        summary = json.loads(run.run.summary.read_bytes())
        steps = read_lines(run.run.metrics)
        evaluations = read_lines(run.run.evaluations)
    assert summary["state"] == "finished" and summary["num_steps"] == 60 == len(steps)
    # The best evaluation, not the last: at this learning rate so small a model may have forgotten it all again at the end.
    assert max(record["accuracy"] for record in evaluations) > summary["heldout_before"] + 0.1, "it learns"
    assert [record["step"] for record in evaluations] == [0, 20, 40, 60]
    assert summary["share_stale"] >= 0.5, "it really is asynchronous"
    assert steps[-1]["tokens_trained"] == summary["tokens_trained"] <= summary["tokens_generated"]
    assert steps[-1]["weight_updates"] >= 1 and steps[-1]["grad_norm"] >= 0
    assert {"reward", "staleness_histogram", "behavior_ess", "clip_share", "entropy", "train_s", "publish_s"} <= steps[0].keys()
    assert list(run.run.tensorboard.iterdir())
    before, after = (load_file(check_tensors(folder, read_architecture(folder))[0]) for folder in (run.run.model, run.run.final_model))
    assert before.keys() == after.keys() and any((before[name] != after[name]).any() for name in before)
    assert "held-out accuracy" in run.output.read_text()


@pytest.mark.parametrize(("bound", "eta"), [("hard", 2), ("admission", 0), ("hard", 0)])
def test_the_bound_is_kept(tmp_path: Path, bound: str, eta: int) -> None:
    with live_run(tmp_path / "run", f"staleness.bound={bound}", f"staleness.eta={eta}", "run.num_steps=12", "evaluation.every_steps=0") as run:
        assert run.launcher.wait(250) == 0, run.output.read_text()
        summary = json.loads(run.run.summary.read_bytes())
        steps = read_lines(run.run.metrics)
    assert summary["num_steps"] == 12 and summary["max_staleness"] <= eta
    if eta == 0:
        assert all(record["token_age_max"] == 0 for record in steps), "every token comes from the version it trains"


@pytest.mark.parametrize("override", ["engine.interrupt=abort", "engine.interrupt=in_place", "algorithm.advantage=batch_norm", "algorithm=ppo",
                                      "weights=disk"])
def test_variants_run(tmp_path: Path, override: str) -> None:
    with live_run(tmp_path / "run", override, "run.num_steps=4", "evaluation.every_steps=0", "weights.dir=run") as run:
        assert run.launcher.wait(250) == 0, run.output.read_text()
        run.assert_nothing_left()


def test_two_replicas_share_the_work(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", "allocation.num_devices=3", "run.num_steps=6", "evaluation.every_steps=0") as run:
        assert run.launcher.wait(250) == 0, run.output.read_text()
        status = json.loads(run.run.status.read_bytes())
        run.assert_nothing_left()
    assert [worker["name"] for worker in status["workers"]] == ["rollout 0", "rollout 1", "trainer 0"]


def test_two_servers_of_one_replica_share_the_work(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", "allocation.num_devices=3", "allocation.replica_size=2", "run.num_steps=6", "evaluation.every_steps=0") as run:
        assert run.launcher.wait(250) == 0, run.output.read_text()
        status = json.loads(run.run.status.read_bytes())
        run.assert_nothing_left()
    assert [worker["name"] for worker in status["workers"]] == ["rollout 0", "trainer 0"]
    assert len(list(run.run.jobs.glob("engine-*.log"))) == 2

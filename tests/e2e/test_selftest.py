"""Runs whose engines and trainer are held against each other: those that agree go on, the others end before they spoil anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.jobs.liveness import still_there
from tests.e2e.runs import START_S, headway, live_run
from workers.run.files import read_lines
from workers.run.folder import RunFolder

MADE_UP = ("engine.server=synthetic", "selftest.action=fail", "data.num_heldout=2", "evaluation.every_steps=0")
"""An engine whose log-probs are not those of the weights that it says it holds."""
TWO_RANKS = ("allocation.num_devices=3", "allocation.inference_fraction=0.34")


@pytest.mark.parametrize("layout", [pytest.param((), marks=pytest.mark.long), (*TWO_RANKS, "trainer.parallel.dp=2")])
def test_a_run_that_would_spoil_the_model_refuses_to_begin(tmp_path: Path, layout: tuple[str, ...]) -> None:
    with live_run(tmp_path / "run", *MADE_UP, *layout, "checkpoint.every_steps=1") as live:
        assert live.launcher.wait(START_S) == 1, live.output.read_text()
        live.assert_nothing_left()
    run, printed = live.run, live.output.read_text()
    outcome = run.ended() or {}
    assert outcome["state"] == "failed" and outcome["reported_by"] == "trainer"
    assert "self-test of version 1.0" in outcome["cause"] and "engine.server=synthetic holds no model" in outcome["cause"]
    assert outcome["cause"] in printed
    assert not read_lines(run.metrics) and not list(run.checkpoints.iterdir()) and not run.final_model.exists()


@pytest.mark.long  # that it refuses: above; a checkpoint that is resumed: test_determinism, test_supervised
def test_a_run_that_goes_on_with_a_broken_engine_keeps_its_checkpoint(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    given = ("run.num_steps=1000", "data.num_heldout=2", "evaluation.every_steps=0", "staleness.eta=0", "reward=array")
    with live_run(run.path, *given) as live:
        live.after_steps(2)
        assert headway("stop", "--drain", str(run.path)).returncode == 0
        live.assert_nothing_left()  # of the reward element either
    assert any("version 1.0: engine and trainer agree" in path.read_text() for path in run.jobs.glob("*_log.out"))
    assert read_lines(run.metrics)[0]["logprob_gap_mean"] < 1e-4
    saved = sorted(run.checkpoints.iterdir())
    config = json.loads(run.config.read_bytes())
    config["engine"]["server"], config["selftest"]["action"] = "synthetic", "fail"  # as if the cluster's engine had been changed meanwhile
    run.config.write_text(json.dumps(config))
    refused = headway("resume", "--plain", str(run.path))
    assert refused.returncode == 1 and "self-test of version 2." in refused.stdout, refused.stdout + refused.stderr
    assert sorted(run.checkpoints.iterdir()) == saved
    steps = len(read_lines(run.metrics))
    done = headway("resume", "--plain", str(run.path), "selftest.action=warn", f"run.num_steps={steps + 2}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert any("warning: self-test of version 3." in path.read_text() for path in run.jobs.glob("*_log.out"))


@pytest.mark.long  # the comparison itself: tests/wire/workers/trainer/selftest; the verdict: tests/unit/launcher/launch/test_selftest.py
def test_a_config_is_tested_by_a_run_of_its_own(tmp_path: Path) -> None:
    passed = headway("selftest", "--plain", "experiment=tiny", f"run.dir={tmp_path / 'run'}")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "self-test passed" in passed.stdout and "the starting weights: log-probs differ by" in passed.stdout
    run = RunFolder(tmp_path / "run")
    steps = read_lines(run.metrics)
    assert [step["step"] for step in steps] == [1, 2] and all(step["num_tokens_compared"] == step["num_tokens"] > 0 for step in steps)
    assert not read_lines(run.evaluations) and not run.final_model.exists() and not still_there(run)


@pytest.mark.long  # the verdict and a run that refuses to begin are tested each by itself
def test_a_config_whose_engine_and_trainer_disagree_fails(tmp_path: Path) -> None:
    failed = headway("selftest", "--plain", "experiment=tiny", "selftest.mean_tolerance=1e-12", f"run.dir={tmp_path / 'failed'}")
    assert failed.returncode == 1 and "self-test FAILED" in failed.stdout and "Likely causes" in failed.stdout

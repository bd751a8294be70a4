"""Evaluations alone, by the command: of a model, of a run's steps; killed half-way, they go on without judging anything twice."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from launcher.jobs.liveness import still_there
from tests.e2e.runs import START_S, LiveRun, headway, live_run, wait_for
from tests.unit.launcher.cli.test_mistakes import answered
from workers.evaluation.statistics import Judged, figures
from workers.run.files import read_lines
from workers.run.folder import RunFolder

SLOW = ("eval=greedy", "engine.server=synthetic", "engine.synthetic_tokens_per_s=6", "engine.num_slots=2", "data.num_heldout=30")
"""Two prompts at a time, the better part of a second each."""


def result(run: RunFolder) -> dict[str, Any]:
    return json.loads(run.evaluation_result.read_bytes())


def times_judged(run: RunFolder) -> Counter[int]:
    """How often each prompt stands in the files of elements."""
    return Counter(line["index"] for path in run.evaluation.glob("*.jsonl") for line in read_lines(path))


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def after_prompts(live: LiveRun, number: int) -> None:
    def judged() -> bool:
        live.look()
        assert live.launcher.poll() is None, f"the evaluation ended early:\n{live.output.read_text()}"
        return times_judged(live.run).total() >= number

    wait_for(f"{number} judged prompts", judged, START_S)


def test_an_evaluation_from_the_command_to_its_figures(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    done = headway("--plain", "eval=sampled", "experiment=tiny", "evaluation.num_samples=4", "evaluation.pass_at=[1,3]", f"run.dir={run.path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none for training" in done.stdout and "20 prompts x 4 samples, temperature 1" in done.stdout
    told, samples = result(run), read_lines(run.samples)
    assert len(samples) == 80 and {line["sample"] for line in samples} == {0, 1, 2, 3} and len({line["response"] for line in samples}) > 20
    prompts = list(dict.fromkeys(line["id"] for line in samples))
    of_each = [[line for line in samples if line["id"] == prompt] for prompt in prompts]
    again = figures([Judged([line["score"] for line in lines], [line["answer"] for line in lines]) for lines in of_each], [1, 3], 0.95)
    assert len(prompts) == 20 and {name: told[name] for name in again} == again
    for name in ("avg@4", "pass@1", "pass@3", "maj@4"):
        assert name in done.stdout
    assert [job["name"] for job in run.submission()["jobs"]] == ["evaluation-inference"] and not still_there(run)
    status = headway("status", str(run.path)).stdout
    assert "20 of 20 prompts" in status and "avg@4" in status


def test_an_evaluation_that_is_killed_half_way_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *SLOW) as live:
        run = live.run
        after_prompts(live, 5)
        live.process("inference task").kill()
        assert live.launcher.wait(START_S) == 1
        live.assert_nothing_left()
        before, status = times_judged(run), headway("status", str(run.path))
        assert 5 <= before.total() < 30 and not run.evaluation_result.exists()
        assert status.returncode == 1 and f"{before.total()} of 30 prompts" in status.stdout and "headway resume" in status.stdout
        done = headway("resume", "--plain", str(run.path))
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{before.total()} of 30 prompts are judged" in done.stdout
    assert times_judged(run) == Counter(range(30)), "each prompt once"
    assert len(read_lines(run.samples)) == result(run)["num_prompts"] == 30 and not still_there(run)


def test_another_element_does_what_a_killed_one_had_claimed(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *SLOW, "allocation.num_devices=2") as live:
        after_prompts(live, 5)
        live.process("inference task").kill()
        assert live.launcher.wait(START_S) == 0, live.output.read_text()
        live.assert_nothing_left()
    assert times_judged(live.run) == Counter(range(30)) and result(live.run)["num_prompts"] == 30


def test_a_runs_checkpoint_and_its_final_model_are_the_same_to_an_evaluation(tmp_path: Path) -> None:
    trained = RunFolder(tmp_path / "trained")
    done = headway("--plain", "experiment=tiny", "weights=disk", "run.num_steps=2", "checkpoint.every_steps=1", "evaluation.every_steps=0",
                   "evaluation.num_samples=2", "evaluation.temperature=1", "evaluation.pass_at=[2]", f"run.dir={trained.path}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = read_lines(trained.evaluations)
    assert [record["step"] for record in records] == [0, 2] and all(record["pass"]["2"]["high"] <= 1 for record in records)
    assert all(record["avg"]["low"] <= record["accuracy"] <= record["avg"]["high"] for record in records)
    config = json.loads(trained.config.read_bytes())
    config["trainer"]["device"] = "cuda"  # as of a run on GPUs, which this machine, like a login node, has not
    trained.config.write_text(json.dumps(config))
    (trained.final_model / "manifest.json").unlink()  # it would be the newest itself
    found = {}
    for checkpoint in ("newest", "final"):
        run = RunFolder(tmp_path / checkpoint)
        done = headway("--plain", "eval=greedy", f"evaluation.run={trained.path}", f"evaluation.checkpoint={checkpoint}", f"run.dir={run.path}")
        assert done.returncode == 0, done.stdout + done.stderr
        found[checkpoint] = result(run)
    assert [found[name]["num_prompts"] for name in found] == [20, 20], "the held-out prompts of the run"
    converted, exported = tensors(tmp_path / "newest" / "model"), tensors(trained.final_model)
    assert converted and converted.keys() == exported.keys() and all(np.array_equal(converted[name], exported[name]) for name in converted)
    assert found["newest"]["avg"]["mean"] == pytest.approx(found["final"]["avg"]["mean"], abs=0.05)


@pytest.mark.parametrize(("arguments", "said"), [
    (("trainer.lr=1e-5",), "trainer.lr=1e-05: has no meaning with run.kind=evaluation"),
    (("workflow.temperature=0.5",), "Give evaluation.temperature"),
    (("evaluation.num_samples=0",), "evaluation.num_samples=0: must be at least 1"),
    (("evaluation.num_samples=2",), "evaluation.temperature=0.0: must be greater than 0"),
    (("evaluation.pass_at=[2]",), "must be from 1 to evaluation.num_samples=1"),
    (("reward=array",), "reward.placement='array': must be node"),
    (("model=hf", "model.path=nowhere"), "nowhere"),
    (("evaluation.run=nowhere",), "not a run folder")],
    ids=["training", "temperature", "no-samples", "greedy-samples", "pass-at", "reward-array", "no-model", "no-run"])
def test_what_cannot_be_evaluated_is_refused_and_leaves_nothing(
        tmp_path: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = answered(shlex.join(["--plain", "eval=greedy", "experiment=tiny", f"run.dir={tmp_path / 'run'}", *arguments]), capsys)
    assert status == 2 and said in err, err
    assert not (tmp_path / "run").exists()

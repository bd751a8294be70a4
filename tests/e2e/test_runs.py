"""Whole runs of the tiny experiment: a model made on the spot learns by the same asynchronous pipeline as any other."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from safetensors.numpy import load_file

from tests.e2e.runs import START_S, LiveRun, headway, live_run
from tests.unit.workers.tracking.wandb_files import histories
from workers.model.architecture import read_architecture
from workers.model.tensors import check_tensors
from workers.run.files import read_lines


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """The whole of experiment=tiny, which has ended well, and which two trackers have followed."""
    trackers = ("tracking.to=[wandb,mlflow]", "tracking.offline=true")
    with live_run(tmp_path_factory.mktemp("learned") / "run", "evaluation.every_steps=20", *trackers) as run:
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        run.assert_nothing_left()
    return run


def test_the_tiny_model_learns_asynchronously(learned: LiveRun) -> None:
    run, summary = learned, json.loads(learned.run.summary.read_bytes())
    steps, evaluations = read_lines(run.run.metrics), read_lines(run.run.evaluations)
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
    assert "held-out score" in run.output.read_text()


def test_a_run_leaves_its_report(learned: LiveRun) -> None:
    run = learned.run
    assert f"report {run.report}" in learned.output.read_text()
    page = run.report.read_text()
    assert "all steps done" in page and "Samples before and after" in page and "answered after step 0 and after step 60" in page
    samples = read_lines(run.heldout_samples)
    assert [record["step"] for record in samples] == [0, 20, 40, 60] and all(len(record["samples"]) == 8 for record in samples)
    assert len({tuple(sample["prompt"] for sample in record["samples"]) for record in samples}) == 1, "the same prompts each time"


def test_a_run_keeps_rollouts_to_be_read(learned: LiveRun) -> None:
    path = str(learned.run.path)
    told = [json.loads(line) for line in headway("rollouts", path, "--json", "-n", "100000").stdout.splitlines()]
    held, trained = ([row for row in told if row["kind"] == kind] for kind in ("heldout", "train"))
    assert sorted({row["step"] for row in held}) == [0, 20, 40, 60] and len(held) == 4 * 20
    assert sorted({row["step"] for row in trained}) == list(range(1, 61)) and len({row["group"] for row in trained}) == 2 * 60
    # The trainer has told each token's log-prob before the step, and so where they come from: of the weights that sampled, the same.
    assert all(row["proximal_logprobs"] is not None for row in trained)
    fresh, stale = ([abs(after - before) for row in trained for after, before, version in zip(
        row["proximal_logprobs"], row["logprobs"], row["versions"], strict=True) if (version == row["step"] - 1) == of_step]
        for of_step in (True, False))
    assert max(fresh, default=0.0) < 1e-3 and sum(stale) / len(stale) > 1e-2
    records = {record["step"]: record for record in read_lines(learned.run.evaluations)}
    for step in (0, 60):
        scores = [row["score"] for row in held if row["step"] == step]
        assert sum(scores) / len(scores) == pytest.approx(records[step]["accuracy"])
    shown = headway("rollouts", path, "--kind", "heldout", "--step", "60", "-n", "1").stdout
    assert "step 60 heldout, " in shown and "reference " in shown
    assert headway("report", path).returncode == 0 and '<a href="rollouts.html">' in learned.run.report.read_text()


def test_trackers_have_been_told_all_of_it(learned: LiveRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = learned.run
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    steps = [record["reward"] for record in read_lines(run.metrics)]
    ((remote, lines),) = histories(run.tracking).items()
    assert [line["train/reward"] for line in lines if "train/reward" in line] == pytest.approx(steps)
    assert [line["evaluation/step"] for line in lines if "evaluation/step" in line] == [0, 20, 40, 60]
    assert json.loads((run.tracking / "wandb.json").read_bytes())["remote"] == remote
    client = MlflowClient((run.tracking / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("headway").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["run.name"] == "tiny"
    assert [one.value for one in client.get_metric_history(found.info.run_id, "train/reward")] == pytest.approx(steps)


def test_its_journal_is_replayed_to_the_same_states(learned: LiveRun) -> None:
    path = str(learned.run.path)
    done = headway("replay", path, "--check", "--at", "20")
    assert done.returncode == 0 and "the same decisions at each" in done.stdout and "each prompt once" in done.stdout, done.stdout + done.stderr
    assert "20 of 60" in done.stdout and "rollout 0" in done.stdout
    told = json.loads(headway("replay", path, "--until-stall", "--json").stdout)
    assert told["incarnations"] == [1] and told["points"] >= 1 and told["status"]["complete"] and told["moved"]["input"].startswith("GroupFinished ")


def test_its_trace_adds_up_to_what_was_measured(learned: LiveRun, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = headway("trace", str(learned.run.path), "--out", str(path))
    assert done.returncode == 0 and f"trace {path}" in done.stdout, done.stdout + done.stderr
    events = json.loads(path.read_bytes())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans = [event for event in events if event["ph"] == "X"]
    of_trainer = [event for event in spans if names[event["pid"]] == "trainer"]
    records = read_lines(learned.run.metrics)
    for name, of in (("wait for a batch", "wait_batch_s"), ("train,", "train_s")):
        took = [event["dur"] / 1e6 for event in of_trainer if event["name"].startswith(name)]
        assert sum(took) == pytest.approx(sum(record[of] for record in records), abs=1e-3), "bubbles and work, as metrics.jsonl has them"
    trained = {event["name"] for event in spans if event["cat"] == "leases" and event["args"].get("ended") == "finished"}
    assert {f"training g{index}" for record in read_lines(learned.run.consumed) for index in record["groups"]} <= trained
    assert sum(event["name"].startswith("load ") for event in spans) >= 1 and sum(event["cat"] == "evaluations" for event in spans) == 4
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"groups running", "groups in the buffer"}
    for asked, steps in (("10:20", range(11, 21)), ("10", range(10, 11))):
        some = headway("trace", str(learned.run.path), "--steps", asked, "--share", "0.5", "--out", str(tmp_path / "part.json.gz"))
        assert some.returncode == 0 and int(some.stdout.split(": ")[1].split()[0]) < len(spans) / 3, some.stdout
        events = json.loads(gzip.decompress((tmp_path / "part.json.gz").read_bytes()))["traceEvents"]
        found = {int(event["name"].removeprefix("train, step ")) for event in events if event["name"].startswith("train, ")}
        assert {*steps} <= found <= {*steps, steps[-1] + 1}, "the next one may begin while this one's weights are published"
    assert headway("trace", str(learned.run.path), "--steps", "500:").returncode == 2


ONE, TWO_REPLICAS, TWO_SERVERS = (), ("allocation.num_devices=3",), ("allocation.num_devices=3", "allocation.replica_size=2")


@pytest.mark.parametrize(("bound", "eta", "engines", "variants"), [
    ("hard", 2, TWO_REPLICAS, ["engine.interrupt=in_place", "weights.swap=overlap"]),
    pytest.param("admission", 2, TWO_SERVERS, ["engine.interrupt=abort", "algorithm.advantage=batch_norm"], marks=pytest.mark.long),
    pytest.param("admission", 0, ONE, ["algorithm=ppo"], marks=pytest.mark.long),  # eta=0: test_determinism
    pytest.param("hard", 0, ONE, ["weights=disk"], marks=pytest.mark.long),  # weights=disk: test_evaluation
], ids=["hard-2", "admission-2", "admission-0", "hard-0"])
def test_variants_run_and_keep_their_bound(tmp_path: Path, bound: str, eta: int, engines: tuple[str, ...], variants: list[str]) -> None:
    """Every option and every number of engines once; each bound with and without staleness."""
    given = (f"staleness.bound={bound}", f"staleness.eta={eta}", *engines, *variants)
    with live_run(tmp_path / "run", *given, "run.num_steps=8", "evaluation.every_steps=0", "weights.dir=run") as run:
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        run.assert_nothing_left()
    summary, status, steps = json.loads(run.run.summary.read_bytes()), json.loads(run.run.status.read_bytes()), read_lines(run.run.metrics)
    assert summary["num_steps"] == 8
    if bound == "hard" or eta == 0:
        assert summary["max_staleness"] <= eta
    if eta == 0:
        assert all(record["token_age_max"] == 0 for record in steps), "every token comes from the version it trains"
    rollouts = ["rollout 0", "rollout 1"] if engines == TWO_REPLICAS else ["rollout 0"]
    assert [worker["name"] for worker in status["workers"]] == [*rollouts, "trainer 0"]
    assert len(list(run.run.jobs.glob("engine-*.log"))) == (1 if engines == ONE else 2)

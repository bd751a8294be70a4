"""An evaluation alone is one inference array: whatever becomes of its elements, each prompt is judged once, and the result is there in the end."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from launcher.views import evaluation_view
from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import FAST_BACKOFF, SlurmRun, headway, kill, occupy, slurm_run
from workers.run.files import read_lines

NUM_PROMPTS = 30
SLOW = ("eval=greedy", "allocation.num_devices=3", f"data.num_heldout={NUM_PROMPTS}", "engine.server=synthetic", "engine.synthetic_tokens_per_s=1.5",
        "engine.num_slots=1", *FAST_BACKOFF)
"""A prompt takes each element about two seconds, so that there is time for what happens to it."""
PREEMPTIBLE = ("cluster.inference.partition=preemptible", "cluster.inference.exclude='trn[0-1]'")


def times_judged(run: SlurmRun) -> Counter[int]:
    return Counter(line["index"] for path in run.run.evaluation.glob("*.jsonl") for line in read_lines(path))


def assert_complete(run: SlurmRun) -> None:
    """The result of all prompts, each judged once; nothing is left of the run."""
    outcome = run.ended(240)
    assert (outcome["state"], outcome["reported_by"]) == ("finished", "evaluation"), outcome
    run.assert_nothing_left()
    assert times_judged(run) == Counter(range(NUM_PROMPTS))
    result = json.loads(run.run.evaluation_result.read_bytes())
    assert result["num_prompts"] == len(read_lines(run.run.samples)) == NUM_PROMPTS and result["num_failed"] == 0


@pytest.mark.quick
def test_elements_that_are_preempted_and_killed_lose_no_judged_prompt(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *SLOW, *PREEMPTIBLE) as run:
        run.wait("three elements that have judged something", lambda: times_judged(run).total() >= 3 and len(run.elements("inference")) == 3)
        assert not run.elements("train", "RUNNING", "PENDING"), "there is no training"
        status = headway(cluster, "status", run.run.path)
        assert f"of {NUM_PROMPTS} prompts" in status and "under way" in status and "training" not in status.replace("0.00 training", "")
        other = occupy(cluster, "inference", "inf1")
        cluster.wait_state(other, "RUNNING")
        kill(run.tasks("inference")[0])
        judged_then = times_judged(run).total()
        run.wait("more judged prompts", lambda: times_judged(run).total() > judged_then + 2)
        cluster.run("scancel", str(other))
        assert_complete(run)
        said = headway(cluster, "watch", "--plain", run.run.path)
        assert "avg@1" in said and str(run.run.evaluation_result) in said


def test_an_evaluation_that_was_drained_says_what_is_missing_and_goes_on(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *SLOW) as run:
        run.wait("some judged prompts", lambda: times_judged(run).total() >= 4)
        said = headway(cluster, "stop", "--drain", run.run.path)
        before = times_judged(run).total()
        assert f"drained: {before} of {NUM_PROMPTS} prompts are judged, and kept" in said and before < NUM_PROMPTS, said
        assert run.ended()["state"] == "drained"
        run.assert_nothing_left()
        assert evaluation_view.goes_on(evaluation_view.progress(run.run), run.run.path) in headway(cluster, "status", run.run.path)
        said = headway(cluster, "resume", "--detach", run.run.path)
        assert f"{before} of {NUM_PROMPTS} prompts are judged" in said
        assert_complete(run)


@pytest.mark.timeout(900)
def test_an_element_at_its_time_limit_leaves_the_rest_to_the_next_one(cluster: LocalCluster, tmp_path: Path) -> None:
    limits = ("cluster.time=2", "cluster.signal_delay_s=20", "run.max_hours=0.2", "allocation.num_devices=1", "engine.synthetic_tokens_per_s=0.7")
    with slurm_run(cluster, tmp_path / "run", *SLOW, *limits) as run:
        run.cluster.wait("a second element", lambda: any(path.name.split(".")[0].endswith("_1") for path in run.run.evaluation.glob("*.status")), 400)
        assert run.run.ended() is None and 0 < times_judged(run).total() < NUM_PROMPTS
        assert_complete(run)

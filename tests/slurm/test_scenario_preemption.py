"""Somebody else gets a node of a run: the run saves what it has, waits, and goes on where it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, SLOW_TOKENS, headway, occupy, slurm_run

TRAINING = ("cluster.train.partition=preemptible", "cluster.train.nodelist=trn0")
INFERENCE = ("cluster.inference.partition=preemptible", "cluster.inference.exclude='trn[0-1]'")


@pytest.fixture
def terse_cluster(one_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """A cluster that tells preempted jobs nothing but TERM."""
    cluster = LocalCluster(NTRN=2, USER_SIGNAL=0)
    cluster.up()
    yield cluster
    cluster.down()


@pytest.mark.quick
def test_preempted_training_saves_its_last_step_and_goes_on_from_there(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *TRAINING) as run:
        run.after_steps(3)
        other = occupy(cluster, "train", "trn0")
        run.wait("the end of the first incarnation", lambda: run.endings == ["preempted"])
        end = run.incarnations[0].end
        assert end is not None and end.checkpoint == end.step == run.steps[-1]["step"]
        cluster.wait_state(other, "RUNNING")
        assert len(run.elements("inference")) == 3, "inference keeps its nodes and waits"
        cluster.run("scancel", str(other))
        run.in_epoch(2)
        assert run.incarnations[1].claim.step == end.step, "no step is repeated"
        run.more_steps(20).drain()
        assert run.endings == ["preempted", "drained"]


def test_a_run_whose_training_waits_in_the_queue_can_be_drained_and_resumed(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", "run.num_steps=150", *TRAINING) as run:
        run.after_steps(3)
        other = occupy(cluster, "train", "trn0")
        run.wait("the end of the first incarnation", lambda: run.endings == ["preempted"])
        cluster.wait_state(other, "RUNNING")
        saved = run.steps[-1]["step"]
        run.drain()  # there is no coordinator to ask: inference leaves by itself, and what is pending is cancelled
        cluster.run("scancel", str(other))
        headway(cluster, "resume", "--detach", run.run.path)
        run.assert_sound(timeout_s=180)
        assert run.endings == ["preempted", "finished"] and run.incarnations[1].claim.step == saved


def test_preempted_inference_hands_over_what_it_has_begun_and_comes_back(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *SLOW_TOKENS, *INFERENCE) as run:
        run.with_replicas(3).after_steps(2)
        other = occupy(cluster, "inference", "inf1")
        cluster.wait_state(other, "RUNNING")
        run.wait("two workers", lambda: {worker["host"] for worker in run.workers()} == {"inf0", "inf2"})
        run.more_steps(5)
        assert run.steps[-1]["num_retries"] == 0, "what it had begun was parked, not begun again"
        cluster.run("scancel", str(other))
        run.with_replicas(3)
        run.more_steps(10).drain()
        assert run.endings == ["drained"]


def test_preemption_that_is_announced_by_term_only(terse_cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(terse_cluster, tmp_path / "run", *ENDLESS, *TRAINING, *INFERENCE) as run:
        run.with_replicas(3).after_steps(3)
        others = [occupy(terse_cluster, "train", "trn0"), occupy(terse_cluster, "inference", "inf0")]
        for other in others:
            terse_cluster.wait_state(other, "RUNNING", timeout_s=90)
        run.wait("the end of the first incarnation", lambda: run.endings == ["preempted"])
        end = run.incarnations[0].end
        assert end is not None and end.checkpoint == end.step == run.steps[-1]["step"]
        terse_cluster.run("scancel", *map(str, others))
        run.in_epoch(2)
        assert run.incarnations[1].claim.step == end.step
        run.with_replicas(3).more_steps(20).drain()

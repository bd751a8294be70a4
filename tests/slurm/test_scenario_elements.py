"""Elements end one by one, by their time limit, by somebody's hand or by a crash, and others take their place."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, FAST_BACKOFF, HARD, ROOT, headway, kill, occupy, slurm_run
from workers.coordinator.groups.ledger import ATTEMPTS_PER_EPOCH


def test_hard_kill_of_the_trainer_costs_the_steps_since_the_last_checkpoint_and_no_prompt(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *FAST_BACKOFF, HARD, "checkpoint.every_steps=10") as run:
        run.after_steps(15)
        (trainer,) = run.tasks("train")
        kill(trainer)
        run.in_epoch(2)
        first, second = run.incarnations
        assert first.end is None, "it had no time for a word"
        assert second.claim.step >= 10 and second.claim.step % 10 == 0
        run.more_steps(25).drain()
        assert run.endings == ["killed", "drained"]


@pytest.mark.timeout(900)
def test_three_chunks_of_wall_time_are_one_run(cluster: LocalCluster, tmp_path: Path) -> None:
    # Inference elements meet their time limit too, at about the same time.
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "cluster.time=2", "cluster.signal_delay_s=20", "run.max_hours=0.2", HARD) as run:
        run.in_epoch(3, timeout_s=500)
        for before, after in pairwise(run.incarnations):
            assert before.end is not None and before.end.how == "walltime"
            assert before.end.step == before.end.checkpoint == after.claim.step, "no step is repeated"
        run.with_replicas(3).more_steps(5)
        assert run.steps[-1]["num_retries"] == 0, "what elements had begun at their time limit was parked, not begun again"
        leased_in = {int(path.name.split(".")[1]) // ATTEMPTS_PER_EPOCH for path in run.run.partials.iterdir()}
        assert leased_in <= {2, 3}, "what elements of the first chunk left behind has been taken over for good"
        run.drain()
        assert run.endings == ["walltime", "walltime", "drained"]


def test_training_time_that_is_used_up_drains_the_run(cluster: LocalCluster, tmp_path: Path) -> None:
    # Three minutes in chunks of less than two; the array has elements to spare, which would have gone on.
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "cluster.time=2", "cluster.signal_delay_s=20", "run.max_hours=0.05", HARD) as run:
        run.assert_sound("drained", "run.max_hours=0.05 is used up", timeout_s=600)
        assert len(run.endings) > 1 and set(run.endings[:-1]) == {"walltime"} and run.endings[-1] == "drained"
        with pytest.raises(RuntimeError, match=r"run.max_hours=0.05: must be more than the 0.0\d h that training has had"):
            headway(cluster, "resume", run.run.path)


def test_elements_that_somebody_cancels_are_followed_by_others(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.with_replicas(3).after_steps(3)
        victim = run.elements("inference")[1]
        cluster.run("scancel", victim.job)
        cluster.wait_state(victim.job, "CANCELLED")
        run.wait("another element's worker", lambda: victim.job not in {worker["job"] for worker in run.workers()})
        run.with_replicas(3)
        (victim,) = run.elements("train")
        cluster.run("scancel", victim.job)
        run.in_epoch(2)
        assert run.incarnations[0].end is not None and run.incarnations[0].end.how == "terminated"
        assert run.incarnations[0].end.step == run.incarnations[1].claim.step, "no step is repeated"
        run.more_steps(20).drain()
        assert run.steps[-1]["num_retries"] == 0, "what was begun was handed over"


@pytest.mark.parametrize("role", ["inference", "train"])
def test_term_without_a_warning(cluster: LocalCluster, tmp_path: Path, role: str) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.with_replicas(3).after_steps(3)
        victim = run.elements(role)[0]
        cluster.run("scancel", "--signal=TERM", victim.job, check=False)  # its exit status is 229 where it works
        cluster.wait_state(victim.job, "FAILED")
        if role == "train":
            run.in_epoch(2)
            end = run.incarnations[0].end
            assert end is not None and end.how == "terminated" and end.step == end.checkpoint == run.incarnations[1].claim.step
        run.with_replicas(3).more_steps(20).drain()
        assert run.steps[-1]["num_retries"] == 0


def test_three_crashes_in_a_row_end_the_run_with_the_cause(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *FAST_BACKOFF) as run:
        for number in (1, 2, 3):
            run.in_epoch(number)
            kill(run.tasks("train")[0])
        run.assert_sound("failed", "3 times in a row")
        assert run.endings == ["killed"] * 3


def test_inference_that_waits_for_training_too_long_gives_its_nodes_back_and_returns(cluster: LocalCluster, tmp_path: Path) -> None:
    others = [occupy(cluster, "train", node) for node in ("trn0", "trn1")]
    for other in others:
        cluster.wait_state(other, "RUNNING")
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "rollout.max_idle_minutes=0.2") as run:
        run.wait("inference on its nodes", lambda: len(run.elements("inference")) == 3)
        run.wait("inference back in the queue, held", lambda: not run.elements("inference", "RUNNING", "COMPLETING") and all(
            "Held" in row.reason or "held" in row.reason for row in run.elements("inference", "PENDING")))
        assert {cluster.nodes()[node] for node in ("inf0", "inf1", "inf2")} == {"idle"}
        cluster.run("scancel", *map(str, others))
        run.with_replicas(3).after_steps(20).drain()
        assert run.endings == ["drained"]


def test_training_that_slurm_suspends_goes_on_when_it_is_resumed(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "transport.heartbeat_timeout_s=5") as run:
        run.with_replicas(3).after_steps(5)
        (element,) = run.elements("train")
        cluster.run("scontrol", "suspend", element.job_id)
        seen = run.status["time"]
        cluster.wait("a pause longer than any silence may be", lambda: time.time() - seen > 12)
        cluster.run("scontrol", "resume", element.job_id)
        run.more_steps(10).drain()
        assert run.endings == ["drained"]


@pytest.mark.parametrize("watched", [False, True], ids=["alone", "watched"])
def test_whoever_cancels_training_ends_the_run_in_order(cluster: LocalCluster, tmp_path: Path, watched: bool) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run, contextlib.ExitStack() as stack:
        run.with_replicas(3).after_steps(5)
        if watched:
            command = [sys.executable, "-m", "launcher", "watch", "--plain", str(run.run.path)]
            watch = stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=cluster.env, stdout=subprocess.PIPE, text=True))
            run.wait("the watch", run.run.is_supervised)
        cluster.run("scancel", run.run.arrays("train")[0])
        run.assert_sound("drained", "stopped: training was cancelled by root (scancel)", timeout_s=180)
        assert run.endings == ["terminated"] and len(run.run.arrays("train")) == 1
        if watched:
            assert "cancelled by root" in watch.communicate(timeout=120)[0] and watch.returncode == 0


def test_inference_that_was_cancelled_is_named_where_the_run_ends_for_want_of_it(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "run.stall_minutes=0.8") as run:
        run.with_replicas(3).after_steps(5)
        cluster.run("scancel", run.run.arrays("inference")[0])
        run.assert_sound("failed", "its array was cancelled by root", timeout_s=300)


def test_inference_that_no_training_could_release_ends_the_run(cluster: LocalCluster, tmp_path: Path) -> None:
    short = ("run.max_hours=0.9", "cluster.spare_chunks=0", "checkpoint.every_steps=5")
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *FAST_BACKOFF, *short, "rollout.max_idle_minutes=0.3") as run:
        for epoch in (1, 2):  # an array has two elements at least
            run.in_epoch(epoch)
            for task in run.tasks("train"):
                kill(task)
        run.assert_sound("failed", "no element of training is left in SLURM's queue", timeout_s=240)

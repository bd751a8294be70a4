"""Verifiers in a job array of their own: its elements come and go, training does too, and the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, FAST_BACKOFF, SlurmRun, headway, kill, slurm_run


def with_elements(run: SlurmRun, number: int, *without: str) -> None:
    """Until so many reward elements are known, none of them of the jobs `without`."""
    def there() -> bool:
        jobs = {worker["job"] for worker in run.workers("reward") if not worker["draining"]}
        return len(jobs) == number and not jobs & set(without)

    run.wait(f"{number} reward elements", there)


@pytest.mark.timeout(600)
def test_reward_elements_and_training_come_and_go(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *FAST_BACKOFF, "reward=array", "reward.num_elements=2") as run:
        with_elements(run, 2)
        run.after_steps(3)
        cancelled = run.elements("reward")[0]
        cluster.run("scancel", cancelled.job)
        with_elements(run, 2, cancelled.job)
        victim = run.tasks("reward")[0]
        killed = f"{victim.environ()['SLURM_ARRAY_JOB_ID']}_{victim.environ()['SLURM_ARRAY_TASK_ID']}"
        kill(victim)
        with_elements(run, 2, cancelled.job, killed)
        run.more_steps(3)
        (trainer,) = run.elements("train")
        cluster.run("scancel", trainer.job)
        run.in_epoch(2)
        with_elements(run, 2, cancelled.job, killed)
        assert "reward jobs" in headway(cluster, "status", run.run.path)
        run.more_steps(5).drain()

"""Training as a gang of ranks over nodes: one element, one process for each device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, FAST_BACKOFF, HARD, kill, slurm_run

GANG = ("allocation.num_devices=5", "allocation.inference_fraction=0.6", "allocation.devices_per_node=1")
"""Three replicas, and two training ranks on a node each."""


@pytest.mark.timeout(400)
def test_two_ranks_on_two_nodes_train_as_one_and_end_as_one(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *GANG, *FAST_BACKOFF, HARD, "checkpoint.every_steps=5") as run:
        run.after_steps(6)
        ranks = {task.environ()["SLURM_PROCID"]: task for task in run.tasks("train")}
        assert sorted(ranks) == ["0", "1"] and {task.environ()["SLURMD_NODENAME"] for task in ranks.values()} == {"trn0", "trn1"}
        kill(ranks["1"])  # any rank's death ends the element
        run.in_epoch(2)
        first, second = run.incarnations
        assert first.end is None or first.end.how == "crashed"
        assert second.claim.step >= 5, "it goes on from a checkpoint that both ranks wrote"
        assert len(run.tasks("train")) == 2
        run.more_steps(5).drain()
        assert run.endings[-1] == "drained"

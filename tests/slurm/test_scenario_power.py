"""Nodes lose their power or their network, and the controller is restarted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, HARD, headway, slurm_run


def test_power_cut_of_an_inference_node(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.with_replicas(3).after_steps(3)
        cluster.power_off("inf1")
        run.wait("the loss of one worker", lambda: {worker["host"] for worker in run.workers()} == {"inf0", "inf2"})
        run.more_steps(20)
        cluster.power_on("inf1")
        run.wait("work on the node that came back", lambda: any(
            worker["host"] == "inf1" and worker["tokens_generated"] > 0 for worker in run.workers()))
        run.more_steps(20).drain()
        assert run.endings == ["drained"], "training never stopped"


def test_power_cut_of_the_training_node(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, HARD, "checkpoint.every_steps=10") as run:
        run.after_steps(15)
        cluster.power_off(run.incarnations[0].claim.host)
        run.in_epoch(2)
        first, second = run.incarnations
        assert first.end is None and second.claim.host != first.claim.host
        assert second.claim.step >= 10 and second.claim.step % 10 == 0
        assert "in a row" not in run.logs(), "SLURM starts the element again: that was no crash"
        assert len(run.elements("inference")) == 3
        run.more_steps(25).drain()
        assert run.endings == ["killed", "drained"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_a_trainer_that_lives_on_beside_its_successor_publishes_nothing_and_leaves(cluster: LocalCluster, tmp_path: Path, frozen: bool) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "checkpoint.every_steps=10", "weights=disk") as run:
        run.after_steps(15)
        host = run.incarnations[0].claim.host
        old = [process for task in run.tasks("train") for process in (task, *task.children(recursive=True))]
        assert len(old) == 2, "the trainer and its coordinator"
        for process in old if frozen else []:
            process.suspend()
        cluster.cut_network(host)
        run.in_epoch(2)
        assert run.incarnations[1].claim.host != host
        for process in old if frozen else []:
            assert process.is_running() and process.status() == psutil.STATUS_STOPPED
            os.kill(process.pid, signal.SIGCONT)
        # Without its network SLURM cannot end it: it leaves because it sees that it has been succeeded.
        run.wait("an end of the old trainer", lambda: not any(process.is_running() for process in old))
        first = run.incarnations[0]
        assert first.end is not None and first.end.how == "fenced"
        cluster.restore_network(host)
        run.more_steps(25)
        cluster.wait("the node's return", lambda: cluster.nodes()[host] == "idle")
        published = {path.name.split(".")[0] for path in run.run.weights(run.config.weights.dir).iterdir() if path.name[:1].isdecimal()}
        assert published <= {"2"}
        run.drain()
        assert run.endings == ["fenced", "drained"]


def test_training_goes_on_while_the_controller_is_away(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.with_replicas(3).after_steps(3)
        with cluster.without_controller():
            run.more_steps(20)
            shown = headway(cluster, "status", run.run.path, check=False)
            assert "staleness" in shown and "SLURM cannot be asked" in shown and "Traceback" not in shown, shown
        run.more_steps(20).drain()
        assert run.endings == ["drained"]

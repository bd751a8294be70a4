"""A replica over two nodes: what is lost with a process of its server, with a task, and with a node."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, SLOW_TOKENS, SlurmRun, headway, kill, slurm_run
from tests.slurm.test_scenario_evaluation import SLOW, assert_complete, times_judged

SPREAD = ("allocation.num_devices=3", "allocation.replica_size=2", "allocation.devices_per_node=1", "engine.parallel.tp=2",
          "transport.heartbeat_timeout_s=10")
"""One replica of two nodes with a GPU each; a third inference node is idle. SLURM hears of a power cut later than the run does."""


def tasks(run: SlurmRun) -> dict[str, psutil.Process]:
    """The tasks of the replica, by their rank; none while one of them is ending."""
    try:
        return {task.environ()["SLURM_PROCID"]: task for task in run.tasks("inference")}
    except psutil.NoSuchProcess:
        return {}


def node_of(task: psutil.Process) -> str:
    try:
        return task.environ()["SLURMD_NODENAME"]
    except psutil.NoSuchProcess:
        return ""


def part_of(task: psutil.Process) -> psutil.Process:
    """The server's process on that task's node."""
    return next(child for child in task.children(recursive=True) if "--node-rank" in child.cmdline())


@pytest.mark.timeout(600)
def test_a_replica_over_two_nodes_outlives_a_process_a_task_and_a_node(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, *SPREAD, *SLOW_TOKENS) as run:
        run.with_replicas(1).after_steps(3)
        ranks = tasks(run)
        assert sorted(ranks) == ["0", "1"] and len({node_of(task) for task in ranks.values()}) == 2
        assert any(name.startswith("headway-") for name in cluster.shared_memory(node_of(ranks["1"]))), "its own copy of the weights"

        assert all(node_of(task) in headway(cluster, "status", run.run.path) for task in ranks.values())
        kill(part_of(ranks["1"]))
        run.wait("the server's next start", lambda: any(worker["restarts"] == 1 for worker in run.workers()))
        run.more_steps(3)
        assert tasks(run).keys() == ranks.keys() and tasks(run)["0"].pid == ranks["0"].pid

        kill(ranks["1"])
        run.wait("the next element", lambda: (now := tasks(run)).keys() == ranks.keys() and now["0"].pid != ranks["0"].pid)
        run.with_replicas(1).more_steps(3)
        assert run.steps[-1]["num_retries"] == 0, "what was begun was handed over"

        lost = node_of(tasks(run)["1"])
        cluster.power_off(lost)
        run.wait("a replica elsewhere", lambda: (now := tasks(run)).keys() == ranks.keys() and not {lost, ""} & set(map(node_of, now.values())))
        run.with_replicas(1).more_steps(3)
        cluster.power_on(lost)
        run.drain()
        assert run.endings == ["drained"], "training never stopped"


@pytest.mark.quick
def test_an_evaluation_by_a_replica_over_two_nodes_judges_each_prompt_once(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *SLOW, *SPREAD, "engine.synthetic_tokens_per_s=6") as run:
        run.wait("some judged prompts", lambda: times_judged(run).total() >= 3)
        kill(part_of(tasks(run)["1"]))
        assert_complete(run)

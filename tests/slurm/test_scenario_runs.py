"""Whole runs on a SLURM cluster, from the command to an empty queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import ENDLESS, headway, slurm_run
from workers.run.files import read_lines


@pytest.fixture
def narrow_cluster(one_cluster: LocalCluster) -> Iterator[LocalCluster]:
    """A cluster that allows arrays of six elements only."""
    cluster = LocalCluster(MAX_ARRAY_SIZE=7)
    cluster.up()
    yield cluster
    cluster.down()


@pytest.mark.quick
def test_start_to_finish_with_three_inference_nodes_and_one_for_training(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", "run.num_steps=30", "staleness.bound=hard") as run:
        run.with_replicas(3)
        assert {element.node for element in run.elements("inference")} == {"inf0", "inf1", "inf2"}
        assert [element.node for element in run.elements("train")] in (["trn0"], ["trn1"])
        assert {worker["host"] for worker in run.workers()} == {"inf0", "inf1", "inf2"}
        run.assert_sound()
        assert run.endings == ["finished"]
        assert (run.run.final_model / "config.json").exists()
        assert "finished" in headway(cluster, "status", run.run.path, check=False)


def test_a_drained_run_is_resumed_where_it_was_and_completes(cluster: LocalCluster, tmp_path: Path) -> None:
    """On another node, once one is named that can hold it."""
    def probes() -> set[int]:
        return {row.job_id for row in cluster.squeue() if row.name.endswith("-probe")}

    with slurm_run(cluster, tmp_path / "run", "run.num_steps=60", "cluster.probe_s=30") as run:
        run.after_steps(5).drain()
        drained_at = run.steps[-1]["step"]
        assert 5 <= drained_at < 60
        written = run.run.config_yaml.read_bytes()
        with pytest.raises(RuntimeError, match=r"exit status 2\n(?s:.*)a job on its node has 60 MiB \(cluster.train.mem=60M\)"):
            headway(cluster, "resume", "--detach", run.run.path, "cluster.train.mem=60M")
        assert run.endings == ["drained"] and not run.elements("train"), "nothing was submitted"
        assert run.run.config_yaml.read_bytes() == written and run.run.ended() is not None, "nothing was touched"
        before = probes()
        said = headway(cluster, "resume", "--detach", run.run.path, "cluster.train.nodelist=trn1", "trainer.microbatch_tokens=512")
        assert "a training rank takes about" in said and len(probes() - before) == 2, "one in each partition"
        run.assert_sound(timeout_s=180)
        assert run.endings == ["drained", "finished"]
        assert run.incarnations[1].claim.step == drained_at and run.incarnations[1].claim.host == "trn1"


def test_training_starts_with_one_inference_node_and_the_others_join_later(cluster: LocalCluster, tmp_path: Path) -> None:
    cluster.drain("inf1")
    cluster.drain("inf2")
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.after_steps(10)
        assert [worker["host"] for worker in run.workers()] == ["inf0"]
        cluster.resume("inf1")
        cluster.resume("inf2")

        def three_at_work() -> bool:
            workers = run.workers()
            for worker in workers:
                assert worker["version"] or not (worker["running"] or worker["tokens_generated"]), "work before weights"
            return len(workers) == 3 and all(worker["tokens_generated"] for worker in workers)

        run.wait("work on all three nodes", three_at_work)
        run.more_steps(20).drain()
        assert run.endings == ["drained"]


def test_two_runs_at_once_on_the_same_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    # One GPU a node would keep them apart.
    shared = ("cluster.inference.gpus=none", "cluster.train.gpus=none", "cluster.train.nodelist=trn0", "cluster.train.mem=3000M", *ENDLESS)
    with slurm_run(cluster, tmp_path / "one", *shared) as one, slurm_run(cluster, tmp_path / "two", *shared) as two:
        for run in (one, two):
            run.with_replicas(3).after_steps(1)
        assert {element.node for element in one.elements("inference")} & {element.node for element in two.elements("inference")}
        assert [element.node for element in one.elements("train")] == [element.node for element in two.elements("train")] == ["trn0"]
        for run in (one, two):
            run.more_steps(5)
            assert run.status["refused_peers"] < 10, "one that fetches leaves in mid-handshake now and then; another run's would knock for ever"
            run.drain()
            assert run.endings == ["drained"]


def test_sweep_of_three(cluster: LocalCluster, tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    headway(cluster, "-m", "--plain", "experiment=tiny", "cluster=local_slurm", "allocation.num_devices=4", "cluster.probe_s=0", "run.num_steps=8",
            "staleness.eta=0,1,2", "launch.max_concurrent_runs=2", f"hydra.sweep.dir={sweep}", timeout_s=280)
    runs = json.loads((sweep / "sweep.json").read_text())["runs"]
    assert len(runs) == 3
    for eta, record in enumerate(runs):
        assert f"staleness.eta={eta}" in record["overrides"]
        path = Path(record["run"])
        cluster.wait(f"the end of {path.name}", (path / "outcome.json").exists, timeout_s=120)
        assert json.loads((path / "outcome.json").read_text())["state"] == "finished"
        assert [step["step"] for step in read_lines(path / "metrics.jsonl")] == list(range(1, 9))
    cluster.wait_idle()


def test_stop_ends_a_run_at_once_and_leaves_nothing(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.after_steps(3).stop()
        assert run.endings == ["stopped"]
        assert "no end on record" not in run.run.report.read_text()
        assert "srun: error" not in "".join(path.read_text() for path in run.run.jobs.glob("*_log.out"))


def test_arrays_in_waves_follow_one_another(narrow_cluster: LocalCluster, tmp_path: Path) -> None:
    cluster = narrow_cluster
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "run.max_hours=8", "cluster.spare_chunks=0") as run:
        arrays = run.run.submission()["arrays"]
        sizes = {role: [array["num_elements"] for array in arrays if array["role"] == role] for role in ("inference", "train")}
        assert max(map(max, sizes.values())) <= 7 and len(sizes["train"]) > 1 and len(sizes["inference"]) > 1
        run.with_replicas(3).after_steps(5)
        for role in ("train", "inference"):  # as if all elements of the first wave were used up
            cluster.run("scancel", run.run.arrays(role)[0])
        run.in_epoch(2)
        (element,) = run.elements("train")
        assert element.array == run.run.arrays("train")[1]
        run.with_replicas(3)
        assert {element.array for element in run.elements("inference")} == {run.run.arrays("inference")[1]}
        run.more_steps(20).drain()

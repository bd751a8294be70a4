"""The run folder is away for a while, full, or gone for good."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import LocalCluster
from tests.slurm.runs import END_S, ENDLESS, SlurmRun, headway, slurm_run


@pytest.fixture
def small_disk(one_cluster: LocalCluster, tmp_path: Path) -> Iterator[tuple[LocalCluster, Path]]:
    """A disk of 80 MiB, and a cluster whose nodes see it."""
    (disk := tmp_path / "disk").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=80m", "tmpfs", str(disk)], check=True)
    cluster = LocalCluster(NTRN=1)
    try:
        cluster.up()
        yield cluster, disk
    finally:
        cluster.down()
        subprocess.run(["umount", "-l", str(disk)], check=True)


def said(run: SlurmRun, role: str) -> list[str]:
    """What elements of the role have SLURM show."""
    lines = run.cluster.run("squeue", "--noheader", "--array", "--format=%j|%k").splitlines()
    return [text for name, text in (line.split("|", 1) for line in lines) if f"{run.token}-{role}-" in name and text.startswith("headway:")]


def test_a_run_folder_that_is_away_for_a_while_costs_no_incarnation(cluster: LocalCluster, tmp_path: Path) -> None:
    away = tmp_path / "elsewhere"
    with slurm_run(cluster, tmp_path / "run", *ENDLESS) as run:
        run.after_steps(5)
        run.run.path.rename(away)
        cluster.wait("training to say what it waits for", lambda: said(run, "train") != [])
        away.rename(run.run.path)
        run.more_steps(10)
        cluster.wait("the end of what it said", lambda: not said(run, "train"))
        assert run.endings == ["killed"], "it lives: no end is on record"
        run.run.path.rename(away)  # and now while training is begun anew
        cluster.wait("training to say so again", lambda: said(run, "train") != [])
        cluster.run("scontrol", "requeue", run.elements("train")[0].job_id)
        cluster.wait("a new element that waits", lambda: run.elements("train") and "is full or away: waiting" in "".join(said(run, "train")), 180)
        away.rename(run.run.path)
        run.in_epoch(2).more_steps(5).drain()
        assert len(run.incarnations) == 2


def fill(disk: Path) -> None:
    with (disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(bytes(4096))


def test_a_full_disk_is_waited_for_but_not_for_ever(small_disk: tuple[LocalCluster, Path]) -> None:
    cluster, disk = small_disk
    with slurm_run(cluster, disk / "run", *ENDLESS, "checkpoint.every_minutes=0") as run:
        run.after_steps(5)
        fill(disk)
        cluster.wait("training to say what it waits for", lambda: said(run, "train") != [])
        assert "the disk or your quota is full" in headway(cluster, "status", run.run.path, check=False)
        (disk / "filler").unlink()
        run.more_steps(10).drain()
        assert run.endings == ["drained"]
    with slurm_run(cluster, disk / "again", *ENDLESS, "checkpoint.every_minutes=0", "run.outage_minutes=0.1") as run:
        run.after_steps(5)
        fill(disk)
        outcome = run.ended()
        assert outcome["state"] == "failed" and "the disk or your quota is full" in outcome["cause"] and "run.outage_minutes" in outcome["cause"]
        run.assert_nothing_left()


def test_a_run_whose_folder_is_deleted_ends_by_itself(cluster: LocalCluster, tmp_path: Path) -> None:
    with slurm_run(cluster, tmp_path / "run", *ENDLESS, "run.outage_minutes=0.2", "rollout.max_idle_minutes=0.5") as run:
        run.with_replicas(3).after_steps(5)
        where = run.config.weights.dir
        shutil.rmtree(run.run.path, ignore_errors=True)
        shutil.rmtree(run.run.path, ignore_errors=True)
        cluster.wait("an end of all elements and processes", lambda: not run.queue() and not run.processes(), 3 * END_S)
        assert not run.run.weights(where).exists() and not run.run.store(where).exists()

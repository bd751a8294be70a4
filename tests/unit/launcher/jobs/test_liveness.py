"""Whose jobs the ids in jobs.json are: those of the cluster that they were submitted to, and of no other that shares the folder."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from launcher.config.schema import FullConfig, as_yaml
from launcher.jobs import liveness
from launcher.monitoring import logs, status, stop, watch
from launcher.monitoring.supervisor import lock
from launcher.report import record, table
from launcher.slurm import queries
from workers.config import ClusterKind
from workers.run.folder import RunFolder
from workers.slurm.command import OtherCluster, SlurmError


def array(number: int, **more: object) -> dict:
    return {"role": "train", "name": f"x-train-{number}", "job_id": str(number), "num_elements": 2, "throttle": 1, **more}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    config = FullConfig()
    config.model.path, config.cluster.kind = "model", ClusterKind.slurm
    config.cluster.inference.time = config.cluster.train.time = "60"
    run.config.write_bytes(msgspec.json.encode(config.for_workers()))
    run.config_yaml.write_bytes(as_yaml(config))
    for name in ("squeue", "scancel", "sacct"):  # what another cluster says of ids that it does not know
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {name} >>{tmp_path}/called\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(queries, "cluster_name", lambda: "beta")
    return run


def submitted(run: RunFolder, *arrays: dict) -> None:
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": True, "arrays": arrays, "jobs": []}))


@pytest.mark.parametrize(("names", "other"), [
    (["beta"], ""), (["Beta"], ""), (["alpha"], "alpha"), (["beta", "alpha"], "alpha"), (["alpha", "beta"], ""), ([""], "")])
def test_whose_jobs_they_are(run: RunFolder, names: list[str], other: str) -> None:
    submitted(run, *(array(number, cluster_name=name) for number, name in enumerate(names)))
    said = liveness.other_cluster(run)
    assert f"in the queue of cluster {other!r}, and SLURM here is that of 'beta'" in said if other else not said
    assert [array["cluster_name"] for array in run.present_arrays()] == [name for name in names if name == names[-1]], "the run is in one place"


def test_where_no_name_is_on_record_nobody_is_asked(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> str:
        raise SlurmError("away")

    monkeypatch.setattr(queries, "cluster_name", away)
    submitted(run, array(1))
    assert not liveness.other_cluster(run) and liveness.job_ids(run)["train"] == ["1"]
    submitted(run, array(1, cluster_name="alpha"))
    with pytest.raises(SlurmError, match="away"):
        liveness.job_ids(run)


def test_what_acts_on_jobs_leaves_those_of_another_cluster_alone(run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty queue was taken for the end of the run: training was submitted a second time, an outcome recorded, weights removed."""
    submitted(run, array(1, cluster_name="alpha"))
    for act in (liveness.still_there, liveness.cancel, liveness.kill, lambda run: stop.stop(run, "by the test")):
        with pytest.raises(OtherCluster, match=r"Run this on a login node of 'alpha'"):
            act(run)
    assert run.stop_requested() is not None and run.ended() is None, "the coordinator sees the request, wherever it runs"
    assert watch.main([str(run.path), "--plain"]) == 2 and "its jobs are in the queue of cluster 'alpha'" in capsys.readouterr().err
    with lock(run, print) as held:
        assert held
    assert status.main([str(run.path)]) == 0 and "SLURM cannot be asked: " in capsys.readouterr().out
    assert not (tmp_path / "called").exists()


def test_a_run_that_has_ended_goes_on_on_another_cluster(run: RunFolder, tmp_path: Path) -> None:
    submitted(run, array(1, cluster_name="alpha"), array(2, cluster_name="alpha"))
    run.end("stopped: by the test", "test")
    assert not liveness.still_there(run) and not (tmp_path / "called").exists(), "numbers of another cluster are not asked for"
    submitted(run, array(1, cluster_name="alpha"), array(2, cluster_name="alpha"), array(1, cluster_name="beta"))
    assert liveness.job_ids(run)["train"] == run.arrays("train") == ["1"]


def test_files_are_read_from_everywhere(run: RunFolder) -> None:
    submitted(run, array(1, cluster_name="alpha"))
    (run.jobs / "1_0_0_log.out").write_text("here\n")
    assert logs.newest_log(run, "train").read_text() == "here\n"


def test_a_table_has_the_hours_of_this_cluster_alone(run: RunFolder, tmp_path: Path) -> None:
    other = RunFolder.create(tmp_path / "other")
    other.config.write_bytes(run.config.read_bytes())
    submitted(run, array(1, cluster_name="beta"))
    submitted(other, array(1, cluster_name="alpha"))
    _, rows = table.rows([record.read(run), record.read(other)], 0.0)
    assert [row["hours"] for row in rows] == [0.0, None]

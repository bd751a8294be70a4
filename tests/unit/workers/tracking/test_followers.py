"""What trackers are told: every line once, over incarnations that lose some, by the real libraries without a server."""

from __future__ import annotations

import errno
import json
import os
import socket
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("wandb")
pytest.importorskip("mlflow")

from mlflow import MlflowClient

from tests.support.report_runs import make, step, write_lines
from tests.unit.workers.tracking.wandb_files import histories
from workers.config import ConfigError, Tracker, TrackingConfig, load
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.tracking import tracker, tracker_processes
from workers.tracking.lines import NewLines
from workers.tracking.run_follower import Follower, figures, main
from workers.tracking.tracker_processes import TrackerProcesses


def run_of(folder: Path, num_steps: int, **tracking: object) -> RunFolder:
    run = make(folder / "run", {"tracking": {"project": "tests", "offline": True, "port": 0, **tracking}}, (0.25, 0.75), num_steps)
    run.tracking.mkdir()
    return run


def follow(run: RunFolder, name: Tracker) -> None:
    """Tell all that is there, as by hand."""
    over = threading.Event()
    over.set()
    Follower(run, load(run.config), name, over).follow()


def test_every_line_comes_once_and_in_its_order(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    told = [(file, record["step"]) for file, record in NewLines(run, "one").take()]
    assert told == [("metrics.jsonl", 1), ("metrics.jsonl", 2), ("metrics.jsonl", 3), ("evaluations.jsonl", 0), ("evaluations.jsonl", 10)]
    assert list(NewLines(run, "one").take()) == [], "another process goes on from there"
    assert len(list(NewLines(run, "other").take())) == 5, "another tracker has been told nothing"
    with run.metrics.open("ab") as file:
        file.write(json.dumps(step(4)).encode())
        file.flush()
        assert list(NewLines(run, "one").take()) == [], "half a line is none yet"
        file.write(b"\n")
    assert [record["step"] for _, record in NewLines(run, "one").take()] == [4]


def test_what_was_not_told_to_its_end_is_told_again(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    taken = NewLines(run, "one").take()
    next(taken), next(taken)
    taken.close()
    assert len(list(NewLines(run, "one").take())) == 5, "it broke off before it noted anything"


def test_what_a_new_incarnation_writes_otherwise_is_told_anew(tmp_path: Path) -> None:
    run = run_of(tmp_path, 5)
    lines = NewLines(run, "one")
    assert len(list(lines.take())) == 7
    write_lines(run.metrics, [step(1), step(2), step(3), {**step(4), "reward": 99.0}])  # cut off behind step 3, and gone on
    assert [(record["step"], record["reward"]) for _, record in lines.take()] == [(4, 99.0)]
    assert list(NewLines(run, "one").take()) == []
    write_lines(run.metrics, [step(1), step(2), step(3), {**step(4), "reward": 99.0}, step(5), step(6)])
    assert [record["step"] for _, record in NewLines(run, "one").take()] == [5, 6]


@pytest.mark.parametrize("name", list(Tracker))
def test_a_run_that_goes_on_is_one_run_there(tmp_path: Path, name: Tracker) -> None:
    run = run_of(tmp_path, 2)
    sample = {"prompt_id": "p", "prompt": "1+1=", "reference": "2", "response": "3", "score": 0.0}
    write_lines(run.heldout_samples, [{"step": 0, "samples": [sample]}])
    follow(run, name)
    incarnations.claim(run, "", "", 1, "here", 2, 2)
    with run.metrics.open("ab") as file:
        file.write(json.dumps({**step(3), "alarm_changes": ["entropy_collapse raised"], "loss": None}).encode() + b"\n")
    run.summary.write_text(json.dumps({"state": "finished", "num_steps": 3}))
    run.end("", "test", "finished")
    follow(run, name)
    if name is Tracker.wandb:
        ((remote, lines),) = histories(run.tracking).items()
        assert [line["train/step"] for line in lines if "train/step" in line] == [1, 2, 3]
        assert [line["evaluation/accuracy"] for line in lines if "evaluation/accuracy" in line][:2] == [0.25, 0.75]
        assert any("heldout" in key for line in lines for key in line)
    elif name is Tracker.trackio:
        remote = json.loads((run.tracking / "trackio.json").read_bytes())["remote"]
        with closing(sqlite3.connect(run.tracking / "trackio" / "tests.db")) as database:
            logged = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics order by id")]
            assert {run_name for run_name, in database.execute("select run_name from metrics")} == {remote}
            assert json.loads(database.execute("select config from configs").fetchone()[0])["staleness.eta"] == 4
            assert "entropy_collapse" in database.execute("select text from alerts").fetchone()[0]
        assert [(step, values["train/reward"]) for step, values in logged if "train/reward" in values] == [(1, 0.0), (2, 1.0), (3, 2.0)]
        assert any("heldout" in values for _, values in logged) and logged[-1][1]["summary/num_steps"] == 3
    elif name is Tracker.prometheus:
        remote = json.loads((run.tracking / "prometheus.json").read_bytes())["remote"]
    else:
        client = MlflowClient((run.tracking / "mlruns").as_uri())
        (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        remote = found.info.run_id
        assert found.info.status == "FINISHED" and found.data.params["staleness.eta"] == "4" and "entropy_collapse" in found.data.tags["alarm.3"]
        assert [(one.step, one.value) for one in client.get_metric_history(remote, "train/reward")] == [(1, 0.0), (2, 1.0), (3, 2.0)]
        assert {one.path for one in client.list_artifacts(remote)} == {"heldout", "summary.json"}
    assert json.loads((run.tracking / f"{name.value}.json").read_bytes())["remote"] == remote


def test_a_run_that_was_drained_is_not_over_there(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    run.end("the cluster is serviced", "test", "drained")
    follow(run, Tracker.mlflow)
    client = MlflowClient((run.tracking / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.status == "SCHEDULED" and client.list_artifacts(found.info.run_id) == []


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_cannot_be_locked_it_tells_all_the_same(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int) -> None:
    run = run_of(tmp_path, 2)

    def without_locks(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", without_locks)
    main(run.path, "prometheus")
    assert (run.tracking / "prometheus.json").exists() and "its file system has no locks" in capsys.readouterr().out


def test_only_finite_numbers_are_figures() -> None:
    record = {"step": 3, "reward": 1.5, "loss": None, "odd": float("nan"), "flag": True, "text": "x", "staleness_histogram": {"0": 2}, "alarms": []}
    assert figures(record, "train") == {"train/step": 3, "train/reward": 1.5, "train/staleness_histogram.0": 2}


def test_a_tracker_that_cannot_be_reached_is_said_and_left(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, 1)
    config = json.loads(run.config.read_bytes())
    config["tracking"] |= {"to": ["mlflow"], "url": "http://127.0.0.1:9"}
    run.config.write_text(json.dumps(config))
    monkeypatch.setattr(tracker_processes, "FINISH_S", 0.5)
    monkeypatch.setattr(tracker_processes, "KILLED_S", 60.0)
    TrackerProcesses(run, TrackingConfig(to=[Tracker.mlflow]), 1).close()
    said = capsys.readouterr().out
    assert "tracking: mlflow's process was killed by SIGKILL" in said and f"python -m workers.tracking.run_follower {run.path} mlflow" in said


def test_a_process_that_ends_early_is_said_at_the_next_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path, 1)
    config = json.loads(run.config.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config["tracking"] |= {"to": ["prometheus"], "interface": "127.0.0.1", "port": taken.getsockname()[1]}
        run.config.write_text(json.dumps(config))
        processes = TrackerProcesses(run, TrackingConfig(to=[Tracker.prometheus]), 1)
        said, deadline = "", time.monotonic() + 60
        while not said and time.monotonic() < deadline:
            processes.look()
            said = capsys.readouterr().out
            time.sleep(0.02)
    processes.look()
    processes.close()
    assert "tracking: prometheus's process" in said and "choose another tracking.port, or 0" in said and "python -m" not in said
    assert not capsys.readouterr().out and f"tracking.port={config['tracking']['port']}" in (run.jobs / "tracking-prometheus.log").read_text()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker.PACKAGES, Tracker.mlflow, ("no_such_module", "mlflow-skinny"))
    tracker.check_installed(TrackingConfig(to=[Tracker.wandb]))
    with pytest.raises(ConfigError, match=r"tracking.to=\[mlflow\]: mlflow-skinny is not installed here. Install it on all nodes"):
        tracker.check_installed(TrackingConfig(to=[Tracker.mlflow]))


@pytest.mark.parametrize(("values", "words"), [
    ({"to": [Tracker.wandb, Tracker.wandb]}, "names a tracker twice"), ({"to": [Tracker.wandb], "project": " "}, "must not be empty"),
    ({"to": [Tracker.mlflow], "url": "mlruns"}, "must be http"), ({"to": [Tracker.mlflow], "url": "http://me:word@here"}, "no user, password"),
    ({"to": list(Tracker), "url": "http://here"}, "of one tracker")])
def test_what_cannot_be_is_refused(values: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TrackingConfig(**values).check()

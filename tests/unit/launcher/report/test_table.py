"""The table of a sweep: what differs between its runs, and what came out. The command line."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.report import main
from launcher.report.record import flat, read
from launcher.report.sweep_page import _short
from launcher.report.table import COLUMNS, differences, find_runs, rows
from tests.support.report_runs import make
from workers.config import RunKind

ROOT = Path(__file__).resolve().parents[4]


def test_what_differs() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [1]}}, "e": None}) == {"a.b": 1, "a.c.d": [1], "e": None}
    assert differences([{"x": 1, "y": 2, "run.dir": "a"}, {"x": 1, "y": 3, "run.dir": "b"}, {"x": 1, "z": 0}]) == ["y", "z"]


def test_runs_of_a_sweep_and_of_a_folder(tmp_path: Path) -> None:
    second, first = make(tmp_path / "1"), make(tmp_path / "0")
    (tmp_path / "other").mkdir()
    assert find_runs(tmp_path) == [first, second]
    listed = [{"index": 1, "overrides": [], "run": str(first.path)}, {"index": 0, "overrides": [], "run": str(second.path)}]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": listed}))
    assert find_runs(tmp_path) == [second, first]


def test_the_figures(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a", {"staleness": {"eta": 0}, "run": {"num_steps": 20}}, (0.25, 0.5, 0.75), 20, "finished"),
            make(tmp_path / "b", {"staleness": {"eta": 4}, "run": {"num_steps": 20}})]
    keys, (first, second) = rows([read(run) for run in runs], 1e12)
    assert keys == ["staleness.eta"], "paths in a run's own folder are no difference"
    assert (first["staleness.eta"], first["state"], first["step"], first["heldout_before"], first["heldout_after"]) == (0, "finished", 20, 0.25, 0.75)
    assert first["reward"] == pytest.approx(14.5) and first["max_staleness"] == 3 and first["tokens_trained"] == 1900 and first["hours"] is None
    assert 0 <= first["wall_s"] < 600
    assert (second["state"], second["step"], second["heldout_before"], second["reward"], second["wall_s"]) == ("gone", 0, None, None, None)
    runs[0].summary.write_text(json.dumps({"max_staleness": 1}))  # of an earlier end: it was resumed since
    assert rows([read(run) for run in runs], 1e12)[1][0]["max_staleness"] == 3


@pytest.mark.parametrize("broken", ['{"cluster": "slurm"', '{"cluster": "slurm", "arrays": [{}]}'])
def test_a_run_with_broken_records_is_a_row_like_the_others(tmp_path: Path, broken: str) -> None:
    runs = [make(tmp_path / "a", None, (), 3), make(tmp_path / "b", None, (), 4)]
    runs[0].submitted.write_text(broken)
    first, second = rows([read(run) for run in runs], 1e12)[1]
    assert (first["step"], first["hours"], second["step"]) == (3, None, 4)


def test_a_run_that_is_gone_has_lasted_to_its_last_sign(tmp_path: Path) -> None:
    run = make(tmp_path / "a", None, (), 3)
    began = read(run).lives[0].claim.time
    run.status.write_text(json.dumps({"time": began + 100}))
    record = read(run)
    assert record.state == "gone" and record.wall_s(began + 1e6) == 100 and record.ended_at is None
    run.end("stopped: by me", "test")
    assert read(run).state == "stopped", "as in `headway runs`"


def test_the_table_of_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, mean in (("a", 0.25), ("b", 0.5)):
        run = make(tmp_path / name, {"evaluation": {"checkpoint": name}}, kind=RunKind.evaluation)
        run.evaluation_result.write_text(json.dumps({"avg": {"mean": mean, "low": 0.1, "high": 0.6}}))
    assert main([str(tmp_path), "--json"]) == 0
    assert [(line["evaluation.checkpoint"], line["heldout_after"]) for line in json.loads(capsys.readouterr().out)] == [("a", 0.25), ("b", 0.5)]
    assert main([str(tmp_path), "--html"]) == 2 and f"Their table: headway report {tmp_path}" in capsys.readouterr().err


def test_a_sweep_that_was_moved_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    listed = [{"index": at, "overrides": [], "run": str(make(before / name, {"staleness": {"eta": at}}).path)} for at, name in enumerate("abc")]
    (before / "sweep.json").write_text(json.dumps({"runs": listed}))
    before.rename(after)
    (after / "c").rename(tmp_path / "elsewhere")
    assert main([str(after), "--json"]) == 0
    said = capsys.readouterr()
    assert [line["run"] for line in json.loads(said.out)] == ["a", "b"] and f"{before / 'c'}: there is no run any more" in said.err


def test_runs_are_told_apart_by_whole_keys_where_their_ends_are_alike() -> None:
    assert _short(["trainer.parallel.tp", "engine.parallel.tp", "staleness.eta"]) == {
        "trainer.parallel.tp": "trainer.parallel.tp", "engine.parallel.tp": "engine.parallel.tp", "staleness.eta": "eta"}


def test_a_controller_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b", "c"):
        make(tmp_path / name, None, (), 2).submitted.write_text(json.dumps({"cluster": "slurm", "arrays": [{"role": "train", "job_id": "7"}]}))
    asked, sayings = tmp_path / "asked", "Unable to contact slurm controller (connect failure)"
    for name in ("scontrol", "squeue", "sacct"):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\necho {name} >> {asked}\necho '{name}: error: {sayings}' >&2\nexit 1\n")
        command.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert main([str(tmp_path), "--json"]) == 0 and asked.read_text().split() == ["scontrol"]
    assert [line["state"] for line in json.loads(capsys.readouterr().out)] == ["?"] * 3


def test_the_table_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", {"staleness": {"eta": 0}}, (0.25, 0.5), 3, "finished")
    make(tmp_path / "b", {"staleness": {"eta": 1}}, (0.25,), 3, "failed")
    assert main([str(tmp_path)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert "held-out before" in header and "eta" in header and "finished" in first and "0.500" in first and "failed" in second
    assert main([str(tmp_path), "--json"]) == 0
    assert [line["state"] for line in json.loads(capsys.readouterr().out)] == ["finished", "failed"]
    assert main([str(tmp_path), "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert set(COLUMNS) < set(lines[0]) and lines[1]["staleness.eta"] == "1" and lines[1]["heldout_after"] == ""
    assert not list(tmp_path.rglob("report.html")), "tables write nothing"


def test_a_run_has_a_page_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a", None, (0.25, 0.5), 3, "finished")
    (run.path / "final_model").mkdir()
    (run.path / "final_model" / "config.json").write_text("{}")  # a model in a run folder is no run
    assert main([str(run.path), "--json"]) == 0
    assert [line["run"] for line in json.loads(capsys.readouterr().out)] == ["a"] and not run.report.exists()
    assert main([str(run.path)]) == 0
    assert capsys.readouterr().out == f"report {run.report}\n" and run.report.stat().st_mode & 0o777 == 0o600


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2 and "neither a run folder (no config.json)" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"runs": [{"index": 0}]}', '{"runs": 3}'])
def test_a_broken_list_of_runs_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.json").write_text(content)
    assert main([str(tmp_path)]) == 2 and "sweep.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_run_without_a_config_is_refused(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a", None, (), 3)
    run.config.write_text(content)
    assert main([str(run.path)]) == 2 and "not a readable run config" in capsys.readouterr().err
    assert not run.report.exists()


def test_an_evaluation_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "a", kind=RunKind.evaluation)
    assert main([str(run.path)]) == 2 and str(run.evaluation_result) in capsys.readouterr().err and not run.report.exists()


@pytest.mark.parametrize("module", ["launcher.monitoring.watch", "launcher.launch.local", "launcher.report"])
def test_what_draws_is_loaded_only_to_draw(module: str) -> None:
    code = f"import sys, {module}; print(*[name for name in ('jinja2', 'matplotlib', 'numpy', 'torch') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []

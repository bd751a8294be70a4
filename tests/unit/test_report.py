"""The table of a sweep: what differs between its runs, and what came out."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.report import COLUMNS, differences, find_runs, flat, main, rows
from workers import incarnations
from workers.rundir import RunFolder


def make(folder: Path, config: dict[str, Any], accuracies: tuple[float, ...] = (), num_steps: int = 0, outcome: str | None = None) -> RunFolder:
    run = RunFolder.create(folder)
    run.config.write_text(json.dumps({"run": {"dir": str(folder), "name": "x"}, "model": {"path": str(run.model)}, **config}))
    run.evaluations.write_text("".join(json.dumps({"step": 10 * number, "accuracy": value}) + "\n" for number, value in enumerate(accuracies)))
    steps = [{"step": at + 1, "reward": float(at), "staleness_max": at % 4, "tokens_trained": 100 * at} for at in range(num_steps)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in steps))
    if num_steps:
        incarnations.claim(run, "", "", 0, "here", 1, 0)
    if outcome is not None:
        run.end("" if outcome == "finished" else "broken", "test", outcome)
    return run


def test_what_differs() -> None:
    assert flat({"a": {"b": 1, "c": {"d": [1]}}, "e": None}) == {"a.b": 1, "a.c.d": [1], "e": None}
    assert differences([{"x": 1, "y": 2, "run.dir": "a"}, {"x": 1, "y": 3, "run.dir": "b"}, {"x": 1, "z": 0}]) == ["y", "z"]


def test_runs_of_a_sweep_and_of_a_folder(tmp_path: Path) -> None:
    second, first = make(tmp_path / "1", {}), make(tmp_path / "0", {})
    (tmp_path / "other").mkdir()
    assert find_runs(tmp_path) == [first, second]
    listed = [{"index": 1, "overrides": [], "run": str(first.path)}, {"index": 0, "overrides": [], "run": str(second.path)}]
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": listed}))
    assert find_runs(tmp_path) == [second, first]


def test_the_figures(tmp_path: Path) -> None:
    runs = [make(tmp_path / "a", {"staleness": {"eta": 0}}, (0.25, 0.5, 0.75), 20, "finished"), make(tmp_path / "b", {"staleness": {"eta": 4}})]
    keys, (first, second) = rows(runs, 1e12)
    assert keys == ["staleness.eta"], "paths in a run's own folder are no difference"
    assert (first["staleness.eta"], first["state"], first["step"], first["heldout_before"], first["heldout_after"]) == (0, "finished", 20, 0.25, 0.75)
    assert first["reward"] == pytest.approx(14.5) and first["max_staleness"] == 3 and first["tokens_trained"] == 1900 and first["hours"] is None
    assert 0 <= first["wall_s"] < 600
    assert (second["state"], second["step"], second["heldout_before"], second["reward"], second["wall_s"]) == ("gone", 0, None, None, None)
    runs[0].summary.write_text(json.dumps({"max_staleness": 7}))
    assert rows(runs, 1e12)[1][0]["max_staleness"] == 7


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a", {"eta": 0}, (0.25, 0.5), 3, "finished")
    make(tmp_path / "b", {"eta": 1}, (0.25,), 2, "failed")
    assert main([str(tmp_path)]) == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert "heldout before" in header and "eta" in header and "finished" in first and "0.500" in first and "failed" in second
    assert main([str(tmp_path), "--json"]) == 0
    assert [line["state"] for line in json.loads(capsys.readouterr().out)] == ["finished", "failed"]
    assert main([str(tmp_path), "--csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert set(COLUMNS) < set(lines[0]) and lines[1]["eta"] == "1" and lines[1]["heldout_after"] == ""


def test_a_folder_without_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2 and "holds neither sweep.json nor run folders" in capsys.readouterr().err

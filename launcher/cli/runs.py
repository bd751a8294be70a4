"""`headway runs [FOLDER]`: the runs in a folder and below it: state, step, last held-out score, age. `--json` prints the same for programs."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table
from rich.text import Text

from launcher.arguments import Parser, refuse
from launcher.jobs.run_state import state, told_once
from launcher.monitoring.logs import tail
from launcher.views import run_view
from launcher.views.queue_view import duration
from launcher.views.terminal import terminal
from workers.run.folder import RunFolder

DEPTH = 3
WIDE = 200
DAY_S = 86400


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where there is no such folder."""
    parser = Parser(prog="headway runs", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, default=Path("runs"), help="where to look (default runs/)")
    parser.add_argument("--json", dest="as_json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        if not options.folder.is_dir():
            what = "is a file" if options.folder.exists() else "there is no such folder"
            return refuse(f"{options.folder}: {what}. Give the folder in which runs are: `headway runs FOLDER`")
        began = {run: made for run in find(options.folder) if (made := _began(run)) is not None}
    except PermissionError as error:
        return refuse(f"{error.filename}: you may not look into it. Give a folder of your own")
    runs = sorted(began, key=lambda run: began[run])
    with told_once(runs):
        rows = [row(run, time.time() - began[run]) for run in runs]
    if options.as_json:
        print(json.dumps(rows))
    elif not rows:
        print(f"{options.folder}: no runs yet. Start one with: headway experiment=demo")
    else:
        console = terminal()
        console.width = console.width if console.is_terminal else WIDE
        console.print(_table(rows, options.folder))
    return 0


def find(folder: Path, depth: int = DEPTH) -> Iterator[RunFolder]:
    """The run folders in a folder, and in its folders, as sweeps have them. What may not be entered is passed over below the first."""
    if (folder / "config.json").is_file() and (folder / "jobs").is_dir():
        yield RunFolder(folder.absolute())
        return
    inside: list[Path] = []
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        inside += sorted(folder.iterdir()) if depth else []
    for path in inside:
        if path.is_dir() and os.access(path, os.R_OK | os.X_OK):
            yield from find(path, depth - 1)


def _began(run: RunFolder) -> float | None:
    """When its folder was made, seconds since 1970: nothing is added to keys/ later. None where it was removed meanwhile."""
    try:
        return (run.keys if run.keys.is_dir() else run.path).stat().st_mtime
    except FileNotFoundError:
        return None


def row(run: RunFolder, age_s: float) -> dict:
    """One run's figures; None for what is not known (yet)."""
    step, evaluation = _last(run.metrics).get("step"), _last(run.evaluations)
    score = evaluation.get("heldout_loss", evaluation.get("accuracy"))
    figure = "" if score is None else "heldout_loss" if "heldout_loss" in evaluation else run_view.figure(evaluation)
    if run.evaluation_result.is_file():  # an evaluation alone
        figure, score = "score", (_object(run.evaluation_result).get("avg") or {}).get("mean")
    return {"run": str(run.path), "state": _state(run), "step": step, "figure": figure or None, "score": score, "score_step": evaluation.get("step"),
            "age_s": round(age_s, 1)}


def _state(run: RunFolder) -> str:
    try:
        return state(run, _object(run.outcome))
    except (OSError, ValueError, KeyError, TypeError):
        return "?"


def _last(path: Path) -> dict:
    """The last whole line of a JSON lines file; {} where there is none."""
    try:
        lines = tail(path, 2)[0].splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            return json.loads(line)
        except ValueError:  # just being written
            continue
    return {}


def _object(path: Path) -> dict:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _table(rows: list[dict], folder: Path) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("run", "state", "step", "held-out", "age"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for one in rows:
        score = "-" if one["score"] is None else f"{one['score']:.3f}" + (" nats" if one["figure"] == "heldout_loss" else "")
        age = one["age_s"]
        path = Path(one["run"])
        shown = folder / path.relative_to(folder.absolute()) if path.is_relative_to(folder.absolute()) else path
        table.add_row(Text(str(shown)), one["state"], "-" if one["step"] is None else str(one["step"]), score,
                      f"{int(age // DAY_S)}d" if age > DAY_S else duration(age))
    return table


if __name__ == "__main__":
    sys.exit(main())

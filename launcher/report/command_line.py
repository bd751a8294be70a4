"""The command line of `headway report`."""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launcher.arguments import Parser, refuse
from launcher.jobs.run_state import told_once
from launcher.report.record import read
from launcher.report.table import columns, find_runs, rows, table
from launcher.rollouts import kept_rows
from launcher.views.terminal import terminal
from workers.run.folder import RunFolder, RunFolderError

WIDE = 10_000
DESCRIPTION = "A page about a run (RUN/report.html), or the table of a sweep's runs; --html makes a page of these, --json and --csv are for programs."


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where there is nothing to report on, 1 where the page cannot be written."""
    parser = Parser(prog="headway report", description=DESCRIPTION)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="run folder, folder of a sweep, or folder of run folders")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", action="store_true", help="write FOLDER/report.html; of a run that is what is done anyway")
    form.add_argument("--json", dest="as_json", action="store_true", help="a list of objects, one a run")
    form.add_argument("--csv", dest="as_csv", action="store_true", help="a table with a header, a line a run")
    options = parser.parse_args(arguments)
    folder = options.folder
    try:
        one = (folder / "config.json").is_file()
        runs = [RunFolder(folder.absolute())] if one else _runs_of(folder)
        if not runs:
            return refuse(f"{folder}: neither a run folder (no config.json), nor does it hold sweep.json or run folders. "
                          "Give the folder that `headway` or `headway -m` printed")
        with told_once(runs):
            if options.html or (one and not options.as_json and not options.as_csv):
                return _write_page(folder, runs, one)
            return _print_table(runs, options.as_json, options.as_csv)
    except RunFolderError as error:
        return refuse(str(error))
    except PermissionError as error:
        return refuse(f"{error.filename}: you may not look into it. Give a folder of your own")


def _runs_of(folder: Path) -> list[RunFolder]:
    try:
        found = find_runs(folder)
    except ValueError as error:
        raise RunFolderError(f"{folder / 'sweep.json'}: cannot be read ({error}). Give the folders of its runs one by one") from error
    for run in found:
        if not run.config.is_file():
            print(f"headway: {run.path}: there is no run any more; left out", file=sys.stderr)
    return [run for run in found if run.config.is_file()]


def _write_page(folder: Path, runs: Sequence[RunFolder], one: bool) -> int:
    from launcher.report import page, sweep_page  # bring Jinja2

    try:
        print(f"report {page.write(runs[0]) if one else sweep_page.write(folder, runs)}", flush=True)
        if one and kept_rows.parts(runs[0].rollouts):
            _write_rollouts(runs[0])
        return 0
    except OSError as error:
        print(f"headway: the report cannot be written: {error}", file=sys.stderr)
        return 1


def _write_rollouts(run: RunFolder) -> None:
    from launcher.rollouts import rollouts_page

    try:
        print(f"rollouts {rollouts_page.write(run, kept_rows.Wanted())}")
    except ImportError:
        print(f"no page of the rollouts: {kept_rows.MISSING}")
    except (ValueError, OSError) as error:
        print(f"no page of the rollouts: {error}")


def _print_table(runs: Sequence[RunFolder], as_json: bool, as_csv: bool) -> int:
    keys, lines = rows([read(run, samples=False) for run in runs], time.time())
    if as_json:
        print(json.dumps(lines))
    elif as_csv:
        writer = csv.DictWriter(sys.stdout, columns(keys))
        writer.writeheader()
        writer.writerows(lines)
    else:
        console = terminal()
        console.width = console.width if console.is_terminal else WIDE
        console.print(table(keys, lines))
    return 0

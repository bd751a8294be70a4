"""`headway report SWEEP`: one line for each run of a sweep: what differs between them, and what came out. --json and --csv for programs.

SWEEP is the folder of a sweep (sweep.json lists its runs), or any folder of run folders.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from launcher import slurm
from launcher.accounting import account, gpus_per_element, newest_checkpoint
from launcher.arguments import refuse
from launcher.living import ROLES, job_ids, living, on_slurm
from launcher.queue_view import duration
from launcher.slurm import HistoryEntry
from workers import incarnations
from workers.files import read_lines
from workers.rundir import RunFolder
from workers.slurm_command import SlurmError

RECENT = 10
WIDE = 10_000
OWN_KEYS = ("run.dir", "run.name")
COLUMNS = ("run", "state", "step", "heldout_before", "heldout_after", "reward", "max_staleness", "tokens_trained", "hours", "wall_s")


def find_runs(folder: Path) -> list[RunFolder]:
    """The runs of a sweep, or the run folders in a folder, in their order."""
    try:
        listed = json.loads((folder / "sweep.json").read_bytes())["runs"]
        return [RunFolder(Path(entry["run"])) for entry in sorted(listed, key=lambda entry: entry["index"])]
    except FileNotFoundError:
        return [RunFolder(path.parent.absolute()) for path in sorted(folder.glob("*/config.json"))]


def flat(config: dict, prefix: str = "") -> dict[str, object]:
    """{'a': {'b': 1}} -> {'a.b': 1}."""
    result: dict[str, object] = {}
    for key, value in config.items():
        result |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return result


def differences(configs: list[dict[str, object]]) -> list[str]:
    """The keys whose values are not the same in all configs."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in OWN_KEYS)
    return [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]


def _state(run: RunFolder) -> str:
    outcome = run.ended()
    if outcome is not None:
        return outcome["state"]
    try:
        left = living(run)
    except SlurmError:
        return "?"
    if not left:
        return "gone"
    waiting = [entry for entry in left if isinstance(entry, slurm.QueueEntry) and entry.state.waiting]
    return "pending" if len(waiting) == len(left) else "running"


def _hours(run: RunFolder, history: list[HistoryEntry] | None, idle_s: float) -> float | None:
    if history is None or not on_slurm(run):
        return None
    arrays = {role: run.arrays(role) for role in ROLES}
    by_role = {role: [entry for entry in history if entry.array_job_id in arrays[role]] for role in ROLES}
    return account(incarnations.history(run), by_role, newest_checkpoint(run), idle_s, gpus_per_element(run)).used


def _heldout(evaluation: dict) -> float:
    """The accuracy, or of a supervised run the loss."""
    return evaluation["accuracy"] if "accuracy" in evaluation else evaluation["heldout_loss"]


def row(run: RunFolder, history: list[HistoryEntry] | None, now: float) -> dict:
    """The figures of one run; None for what is not known (yet)."""
    steps, evaluations = read_lines(run.metrics), read_lines(run.evaluations)
    summary = json.loads(run.summary.read_bytes()) if run.summary.exists() else {}
    last, recent = steps[-1] if steps else {}, steps[-RECENT:]
    lives, outcome = incarnations.history(run), run.ended()
    before = _heldout(evaluations[0]) if evaluations and evaluations[0]["step"] == 0 else None
    rewards = [record["reward"] for record in recent if "reward" in record]
    end = outcome["time"] if outcome is not None else now
    return {
        "run": run.path.name, "state": _state(run), "step": last.get("step", 0),
        "heldout_before": before, "heldout_after": _heldout(evaluations[-1]) if evaluations and evaluations[-1]["step"] else None,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "max_staleness": summary.get("max_staleness", max((record["staleness_max"] for record in steps if "staleness_max" in record), default=None)),
        "tokens_trained": last.get("tokens_trained", 0), "hours": _hours(run, history, last.get("rollout_idle_s", 0.0)),
        "wall_s": round(end - lives[0].claim.time, 1) if lives else None,
    }


def rows(runs: list[RunFolder], now: float) -> tuple[list[str], list[dict]]:
    """The keys that differ, and for each run its figures and the values of those keys."""
    # Paths in a run's own folder are no difference.
    configs = [flat(json.loads(run.config.read_text().replace(str(run.path), "RUN"))) for run in runs]
    keys = differences(configs)
    try:
        ids = [job_id for run in runs if on_slurm(run) for found in job_ids(run).values() for job_id in found]
        history: list[HistoryEntry] | None = slurm.history(ids)
    except SlurmError:
        history = None
    return keys, [row(run, history, now) | {key: config.get(key) for key in keys} for run, config in zip(runs, configs, strict=True)]


def _cell(key: str, value: object) -> str:
    if value is None:
        return "-"
    if key == "wall_s":
        return duration(float(str(value)))
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def table(keys: list[str], lines: list[dict]) -> Table:
    """For people."""
    result = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    columns = [COLUMNS[0], *keys, *COLUMNS[1:]]
    for name in columns:
        result.add_column({"wall_s": "wall", "hours": "GPU-hours"}.get(name, name.replace("_", " ")), no_wrap=True)
    for line in lines:
        result.add_row(*(Text(_cell(name, line[name])) for name in columns))
    return result


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where there are no runs."""
    parser = argparse.ArgumentParser(prog="headway report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sweep", type=Path, help="folder of a sweep, or of run folders")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="as_json", action="store_true", help="a list of objects")
    form.add_argument("--csv", dest="as_csv", action="store_true", help="a table with a header")
    options = parser.parse_args(arguments)
    runs = [run for run in find_runs(options.sweep) if run.config.is_file()]
    if not runs:
        return refuse(f"{options.sweep}: holds neither sweep.json nor run folders. Give the folder that `headway -m` printed")
    keys, lines = rows(runs, time.time())
    if options.as_json:
        print(json.dumps(lines))
    elif options.as_csv:
        writer = csv.DictWriter(sys.stdout, [COLUMNS[0], *keys, *COLUMNS[1:]])
        writer.writeheader()
        writer.writerows(lines)
    else:
        console = Console(markup=False, highlight=False)
        console.width = console.width if console.is_terminal else WIDE
        console.print(table(keys, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())

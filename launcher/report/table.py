"""One line for each run of a sweep: what differs between them, and what came out; as figures, and as a table for a terminal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from launcher.jobs.liveness import ROLES, job_ids, on_slurm, other_cluster
from launcher.report.record import Record, number
from launcher.report.series import values
from launcher.slurm import queries
from launcher.slurm.accounting import IdleTime, account, gpus_per_element, newest_checkpoint
from launcher.slurm.queries import HistoryEntry
from launcher.views.queue_view import duration
from workers.run.folder import RunFolder
from workers.slurm.command import SlurmError

RECENT = 10
OWN_KEYS = ("run.dir", "run.name")
COLUMNS = ("run", "state", "step", "heldout_before", "heldout_after", "reward", "max_staleness", "tokens_trained", "hours", "wall_s")


def find_runs(folder: Path) -> list[RunFolder]:
    """The runs of a sweep, or the run folders in a folder, in their order. Raises `ValueError` where sweep.json is broken."""
    try:
        listed = json.loads((folder / "sweep.json").read_bytes())["runs"]
        return [_found(folder, Path(entry["run"])) for entry in sorted(listed, key=lambda entry: entry["index"])]
    except FileNotFoundError:
        return [RunFolder(path.parent.absolute()) for path in sorted(folder.glob("*/config.json"))]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r} in its list of runs") from error


def _found(sweep: Path, path: Path) -> RunFolder:
    """The run at `path`, or of its name in the sweep, where that was moved or copied."""
    here = sweep.absolute() / path.name
    return RunFolder(here if not path.exists() and here.exists() else path)


def differences(configs: Sequence[dict[str, object]]) -> list[str]:
    """The keys whose values are not the same in all configs."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in OWN_KEYS)
    return [key for key in keys if len({json.dumps(config.get(key)) for config in configs}) > 1]


def _hours(record: Record, history: list[HistoryEntry] | None) -> float | None:
    run = RunFolder(record.path)
    if history is None:
        return None
    try:
        arrays = {role: run.arrays(role) for role in ROLES}
        by_role = {role: [entry for entry in history if entry.array_job_id in arrays[role]] for role in ROLES}
        return account(record.lives, by_role, newest_checkpoint(run), IdleTime().add(record.steps).seconds, gpus_per_element(run)).used
    except (OSError, ValueError, KeyError):  # broken records, which the page says
        return None


def row(record: Record, history: list[HistoryEntry] | None, now: float) -> dict:
    """The figures of one run; None for what is not known (yet)."""
    last, evaluations = record.steps[-1] if record.steps else {}, values(record.evaluations, record.figure)
    rewards = [value for _, value in values(record.steps[-RECENT:], "reward")]
    ages = [value for _, value in values(record.steps, "staleness_max")]
    wall = record.wall_s(now)
    return {
        "run": record.path.name, "state": record.state, "step": int(number(last.get("step")) or 0),
        "heldout_before": evaluations[0][1] if evaluations and evaluations[0][0] == 0 else None,
        "heldout_after": evaluations[-1][1] if evaluations and evaluations[-1][0] else _mean_score(record.result),
        "reward": sum(rewards) / len(rewards) if rewards else None, "max_staleness": int(max(ages)) if ages else None,
        "tokens_trained": int(number(last.get("tokens_trained")) or 0), "hours": _hours(record, history),
        "wall_s": None if wall is None else round(wall, 1),
    }


def _mean_score(result: dict) -> float | None:
    told = result.get("avg")
    return number(told.get("mean")) if isinstance(told, dict) else None


def rows(records: Sequence[Record], now: float) -> tuple[list[str], list[dict]]:
    """The keys that differ, and for each run its figures and the values of those keys."""
    # Paths in a run's own folder are no difference.
    configs = [{key: value.replace(str(record.path), "RUN") if isinstance(value, str) else value for key, value in record.config.items()}
               for record in records]
    keys = differences(configs)
    runs = [RunFolder(record.path) for record in records]
    try:
        here = {run.path: ids for run in runs if (ids := _jobs_here(run)) is not None}
        history: list[HistoryEntry] | None = queries.history([job_id for ids in here.values() for job_id in ids])
    except SlurmError:
        here, history = {}, None
    return keys, [row(record, history if record.path in here else None, now) | {key: config.get(key) for key in keys}
                  for record, config in zip(records, configs, strict=True)]


def _jobs_here(run: RunFolder) -> list[str] | None:
    """The run's jobs, if they are of the cluster of this machine; None too where its records are broken, which the page says. Raises `SlurmError`."""
    try:
        return [job_id for found in job_ids(run).values() for job_id in found] if on_slurm(run) and not other_cluster(run) else None
    except (OSError, ValueError, KeyError):
        return None


def columns(keys: Sequence[str]) -> list[str]:
    """The columns of a table whose runs differ in `keys`."""
    return [COLUMNS[0], *keys, *COLUMNS[1:]]


def heading(name: str) -> str:
    """A column's name for people."""
    names = {"wall_s": "wall", "hours": "device-hours", "heldout_before": "held-out before", "heldout_after": "held-out after"}
    return names.get(name, name.replace("_", " "))


def cell(key: str, value: object) -> str:
    """A value for people."""
    if value is None:
        return "-"
    if key == "wall_s":
        return duration(float(str(value)))
    return f"{value:.3f}" if isinstance(value, float) and key in COLUMNS else str(value)


def table(keys: Sequence[str], lines: Sequence[dict]) -> Table:
    """For a terminal."""
    result, names = Table(box=None, header_style="dim", padding=(0, 2, 0, 0)), columns(keys)
    for name in names:
        result.add_column(heading(name), no_wrap=True)
    for line in lines:
        result.add_row(*(Text(cell(name, line[name])) for name in names))
    return result

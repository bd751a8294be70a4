"""The report at the end of a run, and of a sweep. The coordinator has its run's written; this sees to it where none could: it was killed, or there
was none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launcher.sweep import REPORT, Sweep
from workers.run.folder import RunFolder

PATIENCE_S = 60.0


def tell_report(run: RunFolder, say: Callable[[str], None]) -> None:
    """Say where the report is, after having it written if it is not there or older than the run's end. Never fails: says why there is none."""
    trouble = "" if _is_there(run) else _write(str(run.path))
    say(f"no report: {trouble}. Later: headway report {run.path}" if trouble else f"report {run.report}")


def tell_sweep(sweep: Sweep, say: Callable[[str], None]) -> None:
    """Have the page of a sweep written and say where it is, if all its runs have ended. Evaluations have none. Never fails: says what is wrong."""
    try:
        runs = [RunFolder(Path(entry["run"])) for entry in sweep.runs()]
        over, trouble = bool(runs) and all(run.ended() and not run.evaluation.is_dir() for run in runs), ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        over, trouble = True, f"{sweep.folder}: its list of runs cannot be read ({error!r})"
    if over:
        trouble = trouble or _write(str(sweep.folder), "--html")
        say(f"no report: {trouble}. Later: headway report {sweep.folder} --html" if trouble else f"report {sweep.folder / REPORT}")


def _is_there(run: RunFolder) -> bool:
    try:
        return run.report.stat().st_mtime >= run.outcome.stat().st_mtime
    except FileNotFoundError:
        return False


def _write(*arguments: str) -> str:
    """Have it written by a process of its own; returns why that did not work."""
    try:
        done = subprocess.run([sys.executable, "-m", "launcher.report", *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, text=True, errors="replace", timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1] if done.returncode else ""

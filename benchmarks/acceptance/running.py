"""Runs checks, each in a process group of its own that ends with its time, and makes a table of what they tell."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.acceptance.checks import PYTHON, SMALL, Check

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"passed": "pass", "failed": "FAIL", "skipped": "skip", "measured": "-"}


@dataclass(frozen=True)
class Result:
    """What became of a check: `status` is one of `MARKS`. `value`: its figure, as text."""

    name: str
    what: str
    reference: str
    status: str
    value: str
    told: str
    seconds: float


def left_out(check: Check, num_gpus: int, has_sglang: bool, small: bool) -> str:
    """Why a check cannot run here; '' where it can."""
    if small:
        return "" if check.small else "is of GPUs alone"
    if num_gpus < check.num_gpus:
        return f"needs {check.num_gpus} GPU{'s' if check.num_gpus > 1 else ''}, there {'are' if num_gpus != 1 else 'is'} {num_gpus}"
    return "needs SGLang: set HEADWAY_SGLANG_PYTHON" if check.needs_sglang and not has_sglang else ""


def run(check: Check, small: bool) -> Result:
    """Run a check to its end, or to the end of its time."""
    began = time.monotonic()
    process = subprocess.Popen([PYTHON, *check.arguments, *([SMALL] if small else [])], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               text=True, process_group=0)
    try:
        output, _ = process.communicate(timeout=check.limit_s)
        status, value, told = judge(output, process.returncode, small)
    except subprocess.TimeoutExpired:
        status, value, told = "failed", "", f"not done in {check.limit_s} s"
    finally:
        _end(process)
    return Result(check.name, check.what, check.reference, status, value, told, time.monotonic() - began)


def judge(output: str, returncode: int, small: bool) -> tuple[str, str, str]:
    """Status, figure and words of a check by what it has printed. Pure."""
    try:
        said = json.loads(output.strip().splitlines()[-1])
        value, passed, told = str(said["value"]), bool(said["passed"]), str(said.get("told", ""))
    except (IndexError, ValueError, KeyError, TypeError):
        return "failed", "", f"ended with status {returncode}, and told no figure"
    if returncode:
        return "failed", value, f"ended with status {returncode}"
    return ("measured" if small else "passed" if passed else "failed"), value, told


def _end(process: subprocess.Popen) -> None:
    """End what is left of a check."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def table(results: Sequence[Result]) -> str:
    """Pass or fail, figure and reference of each. Pure."""
    rows = [("", "check", "here", "reference", "seconds"),
            *((MARKS[result.status], result.name, result.value or "-", result.reference, f"{result.seconds:.0f}") for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    words = [f"{result.name}: {result.told}" for result in results if result.told]
    return "\n".join([*lines, "", *words]).rstrip()


def write(path: Path, results: Sequence[Result], about: dict[str, object]) -> None:
    """The file that can be attached to a report."""
    path.write_text(json.dumps({"about": about, "checks": [asdict(result) for result in results]}, indent=1) + "\n")


def tell(value: object, passed: bool, told: str = "") -> None:
    """The last line of a check."""
    print(json.dumps({"value": value, "passed": passed, "told": told}), flush=True)

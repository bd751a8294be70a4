"""The processes of a run on this machine: which are alive, and ending them as a last resort.

A process is known by its id and its time of creation, never by its name: ids are used again and machines are shared.
"""

from __future__ import annotations

import contextlib
import json
import time

import psutil

from workers.config import load
from workers.rundir import RunFolder


def submitted_jobs(run: RunFolder) -> list[dict]:
    """The jobs as recorded at submission; empty before that."""
    try:
        return json.loads(run.submitted.read_bytes())["jobs"]
    except FileNotFoundError:
        return []


def _process(pid: int, created: float) -> psutil.Process | None:
    try:
        process = psutil.Process(pid)
        if abs(process.create_time() - created) > 1 or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process
    except psutil.NoSuchProcess:
        return None


def alive(job: dict) -> psutil.Process | None:
    """The job's process, or None if it has ended."""
    return _process(int(job["job_id"]), job["created"])


def living(run: RunFolder) -> list[psutil.Process]:
    """Every living process of the run: its jobs, those that enlisted themselves, and all their children."""
    roots = [alive(job) for job in submitted_jobs(run)]
    with contextlib.suppress(FileNotFoundError):
        roots += [_process(int(entry.name), float(text)) for entry in run.processes.iterdir() if (text := entry.read_text())]
    found: dict[int, psutil.Process] = {}
    for root in roots:
        if root is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return [process for process in found.values() if process.is_running()]


def wait_for_end(run: RunFolder, timeout_s: float) -> bool:
    """Wait until no process of the run is left; false if some are after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := living(run):
        if time.monotonic() > deadline:
            return False
        psutil.wait_procs(left, timeout=0.2)
    return True


def kill(run: RunFolder) -> int:
    """SIGKILL whatever is left of the run and remove its published weights; returns how many processes that were."""
    left = living(run)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    run.remove_weights(load(run.config).weights.dir)
    return len(left)

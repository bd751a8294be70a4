"""The processes of a run on this machine: which are alive, and ending them as a last resort.

A process is known by its id and its time of creation, never by its name: ids are used again and machines are shared.
"""

from __future__ import annotations

import contextlib
import json
import time

import psutil

from workers.rundir import RunFolder


def submitted_jobs(run: RunFolder) -> list[dict]:
    """The jobs as recorded at submission; empty before that."""
    try:
        return json.loads(run.submitted.read_bytes())["jobs"]
    except FileNotFoundError:
        return []


def alive(job: dict) -> psutil.Process | None:
    """The job's process, or None if it has ended."""
    try:
        process = psutil.Process(int(job["job_id"]))
        if abs(process.create_time() - job["created"]) > 1 or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process
    except psutil.NoSuchProcess:
        return None


def living(run: RunFolder) -> list[psutil.Process]:
    """Every living process of the run's jobs."""
    found: list[psutil.Process] = []
    for job in submitted_jobs(run):
        root = alive(job)
        if root is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found += [root, *root.children(recursive=True)]
    return found


def wait_for_end(run: RunFolder, timeout_s: float) -> bool:
    """Wait until no process of the run is left; false if some are after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while left := living(run):
        if time.monotonic() > deadline:
            return False
        psutil.wait_procs(left, timeout=0.2)
    return True


def kill(run: RunFolder) -> int:
    """SIGKILL whatever is left of the run; returns how many processes that were."""
    left = living(run)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=5)
    return len(left)

"""What of a run is still there, and ending it as a last resort. On one machine: processes. On SLURM: elements of its arrays.

A process is known by its id and its time of creation, never by its name: ids are used again and machines are shared. An array is
known by its job id, or, where the answer to its submission was lost, by its name, which no other array has; both on its own cluster.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import time
from collections.abc import Sequence

import psutil

from launcher.config.cluster import ROLES
from launcher.slurm import queries
from launcher.slurm.queries import QueueEntry
from workers.config import ClusterKind, load
from workers.run.folder import RunFolder
from workers.slurm.command import OtherCluster

POLL_S = 2.0
# SLURM kills what is left KillWait (30 s by default) after TERM, and then cleans up.
KILL_S = 90.0
MIN_FREE_BYTES = 1 << 20
RECENT_S = 30.0


def on_slurm(run: RunFolder) -> bool:
    """Whether its jobs are SLURM's; false before the first submission."""
    return run.submission().get("cluster") == ClusterKind.slurm.value


def submitted_jobs(run: RunFolder) -> list[dict]:
    """The jobs on this machine as recorded at submission; empty before that."""
    return run.submission().get("jobs", [])


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


def other_cluster(run: RunFolder) -> str:
    """That the run's jobs are another cluster's than the one whose commands are here, in words; '' where they are of this one, or that is not on
    record. Raises `SlurmError`."""
    names = [name for array in run.present_arrays() if (name := array.get("cluster_name"))]
    here = queries.cluster_name() if names else ""
    if not here or names[-1].casefold() == here.casefold():
        return ""
    return (f"{run.path}: its jobs are in the queue of cluster {names[-1]!r}, and SLURM here is that of {here!r}, where their numbers mean others' "
            f"jobs or none. Run this on a login node of {names[-1]!r}, or with SLURM_CONF=FILE that names its slurm.conf")


def job_ids(run: RunFolder) -> dict[str, list[str]]:
    """The ids of the run's arrays by role; none of another cluster, where the run has ended. Raises `SlurmError`, `OtherCluster` where it has not."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    if other := other_cluster(run):
        if run.ended() is None:
            raise OtherCluster(other)
        return found
    for array in run.present_arrays():
        found[array["role"]] += [array["job_id"]] if array["job_id"] else queries.jobs_named(array["name"])
    return found


def submitted_roles(run: RunFolder) -> tuple[str, ...]:
    """The roles of which arrays have been submitted; a supervised run has no inference, an evaluation no training, and few runs have elements
    for rewards."""
    if run.evaluation.is_dir():
        return ("inference",)
    submitted = {array["role"] for array in run.submission().get("arrays", [])}
    return tuple(role for role in ROLES if role == "train" or role in (submitted or ("inference",)))


def queue(run: RunFolder) -> dict[str, list[QueueEntry]]:
    """Every element that has not ended, by role. Raises `SlurmError`."""
    ids = job_ids(run)
    entries = queries.squeue([job_id for role in ROLES for job_id in ids[role]])
    return {role: [entry for entry in entries if entry.array_job_id in ids[role]] for role in ROLES}


def no_room(run: RunFolder) -> str:
    """That the disk of the run folder is full, in words; '' where it is not, as far as that can be seen: a quota cannot."""
    free = shutil.disk_usage(run.path).free
    return "" if free >= MIN_FREE_BYTES else f"{run.full_disk()} ({free >> 10} KiB are free). Free some space"


def still_there(run: RunFolder) -> Sequence[psutil.Process | QueueEntry]:
    """Everything of the run that has not ended: its processes on this machine, or its elements, those that wait too.

    Raises `SlurmError`.
    """
    return [entry for entries in queue(run).values() for entry in entries] if on_slurm(run) else _processes(run)


def host_elsewhere(run: RunFolder) -> str:
    """The other machine on which a run on one machine is alive, as it has written its status lately; '' where that cannot be said."""
    host = run.submission().get("host", "")
    return host if host not in ("", socket.gethostname()) and run.ended() is None and _is_written(run) else ""


def _is_written(run: RunFolder) -> bool:
    return run.status.exists() and abs(time.time() - run.status.stat().st_mtime) < RECENT_S


def lost_here(run: RunFolder) -> str:
    """That nothing is left of a run on this machine which nobody has ended, as after a power cut, in words; '' where it is otherwise, or its status
    is still written, on another machine then."""
    if on_slurm(run) or run.ended() is not None or not run.submission().get("complete"):
        return ""
    if _is_written(run) or still_there(run):
        return ""
    return f"nothing of the run is left on this machine, and nobody has written down why. Go on with: headway resume {run.path}"


def _processes(run: RunFolder) -> list[psutil.Process]:
    """Its jobs, the processes that enlisted themselves, and all their children."""
    roots = [alive(job) for job in submitted_jobs(run)]
    with contextlib.suppress(FileNotFoundError):
        roots += [_process(int(entry.name), float(text)) for entry in run.processes.iterdir() if (text := entry.read_text())]
    found: dict[int, psutil.Process] = {}
    for root in roots:
        if root is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {process.pid: process for process in (root, *root.children(recursive=True))}
    return [process for process in found.values() if process.is_running()]


def cancel(run: RunFolder, pending_only: bool = False) -> None:
    """scancel all elements, or those that have not begun. Raises `SlurmError`."""
    queries.cancel([job_id for ids in job_ids(run).values() for job_id in ids], pending_only)


def wait_for_end(run: RunFolder, timeout_s: float) -> bool:
    """Wait until nothing of the run is left; false if something is after `timeout_s`. Raises `SlurmError`."""
    deadline = time.monotonic() + timeout_s
    while left := still_there(run):
        if time.monotonic() > deadline:
            return False
        processes = [one for one in left if isinstance(one, psutil.Process)]
        if processes:
            psutil.wait_procs(processes, timeout=0.2)
        else:
            time.sleep(POLL_S)
    return True


def kill(run: RunFolder) -> int:
    """End by force whatever is left of the run (SIGKILL, or scancel), and remove its published weights; returns how much that was.

    Raises `SlurmError`.
    """
    if on_slurm(run):
        num_left = len(still_there(run))
        cancel(run)
        wait_for_end(run, KILL_S)
    else:
        left = _processes(run)
        num_left = len(left)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
    run.remove_weights(load(run.config).weights.dir)
    return num_left

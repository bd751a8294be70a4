"""Submission. The only file that imports submitit."""

from __future__ import annotations

import json
import signal
import sys
import time

import psutil
import submitit

from launcher.jobs import JobSpec
from launcher.schema import FullConfig
from workers.rundir import RunFolder, write_atomic


def describe(spec: JobSpec, config: FullConfig, run: RunFolder) -> str:
    """What submission will do, for --dry-run: one line a process that would be started."""
    command = f"{sys.executable} -u -m submitit.core._submit {run.jobs}"
    lines = [f"# {spec.describe()}; submitit's {config.cluster.kind.value} executor, at most {config.cluster.max_hours:g} h"]
    lines += [f"{command}    # {element}" for element in spec.elements]
    return "\n".join(lines)


def submit(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder) -> list[submitit.Job]:
    """Submit all arrays, or none: if one fails, the others are cancelled. Their ids are written to the run folder."""
    jobs: list[submitit.Job] = []
    # Inherited by the jobs: Ctrl-C and a closing terminal reach the launcher only, which then ends the run in order.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        for spec in specs:
            executor = submitit.LocalExecutor(folder=run.jobs)
            executor.update_parameters(timeout_min=int(config.cluster.max_hours * 60), tasks_per_node=1, stderr_to_stdout=True)
            jobs += executor.submit_array(spec.elements)
    except BaseException:
        for job in jobs:
            job.cancel()
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    names = [f"{spec.name}" for spec in specs for _ in spec.elements]
    record = [{"name": name, "job_id": job.job_id, "created": psutil.Process(int(job.job_id)).create_time(), "log": str(job.paths.stdout)}
              for name, job in zip(names, jobs, strict=True)]
    write_atomic(run.submitted, json.dumps({"cluster": config.cluster.kind.value, "time": time.time(), "jobs": record}, indent=2).encode())
    return jobs


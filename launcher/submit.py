"""Submission. The only file that imports submitit."""

from __future__ import annotations

import json
import math
import signal
import sys
import time

import psutil
import submitit

from launcher.jobs import JobSpec
from launcher.living import kill
from launcher.schema import FullConfig
from workers.files import write_atomic
from workers.rundir import RunFolder


def describe(spec: JobSpec, config: FullConfig, run: RunFolder) -> str:
    """What submission will do, for --dry-run: one line a process that would be started."""
    command = f"{sys.executable} -u -m submitit.core._submit {run.jobs}"
    lines = [f"# {spec.describe()}; submitit's {config.cluster.kind.value} executor, at most {config.cluster.max_hours:g} h"]
    lines += [f"{command}    # {element}" for element in spec.elements]
    return "\n".join(lines)


def submit(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder) -> list[submitit.Job]:
    """Submit all arrays, or none: if one fails, the others are cancelled. Their ids are written to the run folder."""
    jobs: list[submitit.Job] = []
    record: list[dict] = []
    # Inherited by the jobs: Ctrl-C and a closing terminal reach the launcher only, which then ends the run in order.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        for spec in specs:
            executor = submitit.LocalExecutor(folder=run.jobs)
            executor.update_parameters(timeout_min=math.ceil(config.cluster.max_hours * 60), tasks_per_node=1, stderr_to_stdout=True)
            for job in executor.submit_array(spec.elements):
                jobs.append(job)
                record.append({"name": spec.name, "job_id": job.job_id, "created": psutil.Process(int(job.job_id)).create_time(),
                               "log": str(job.paths.stdout)})
            content = {"cluster": config.cluster.kind.value, "time": time.time(), "jobs": record}
            write_atomic(run.submitted, json.dumps(content, indent=2).encode())
    except BaseException as error:
        run.end(f"submission failed: {error}", "launcher")
        kill(run)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return jobs


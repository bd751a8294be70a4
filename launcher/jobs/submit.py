"""Submission. The only file that imports submitit.

On SLURM the jobs of a role go out as one array, or as several that follow one another (job_specs.py). Each is written down in the
run folder's jobs.json before its sbatch, without an id, and again after it with its id: whenever this process dies, what is in the
queue can be found, by id or by name. Either all arrays are submitted or none; but where sbatch gave no clear answer, SLURM may still
take the array, so that its record stays.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import submitit

from launcher.config.schema import FullConfig
from launcher.interrupts import without_sigterm
from launcher.jobs import liveness
from launcher.jobs.job_records import ArrayRecords
from launcher.jobs.job_specs import JobSpec, waves
from launcher.jobs.sbatch_script import local_command, mounted, python_command, sbatch_options, setup_lines, srun_arguments, waiting_lines
from launcher.slurm import queries
from launcher.slurm.parsing import max_array_size
from workers.config import ClusterKind, ConfigError
from workers.run.files import write_atomic
from workers.run.folder import RunFolder
from workers.run.processes import GPUS
from workers.slurm.command import AWAY, SlurmError

DRY_RUN_TOKEN = "0" * 8
REFUSED = "Batch job submission failed:"
SAVING_MIN = 60
"""Minutes that a run on this machine has to save its state when run.max_hours is up (coordinator/process/outside.py), before it is ended by force."""


class SubmissionError(ConfigError, SlurmError):
    """sbatch did not take a script. Its text holds sbatch's own words."""


class _Writer(submitit.SlurmExecutor):
    """Writes scripts on machines without SLURM too."""

    @classmethod
    def affinity(cls) -> int:
        return 2


def submit(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder, after: tuple[str, ...] = (),
           going_on: bool = False) -> list[submitit.Job]:
    """Submit the jobs of all roles, or none: if one submission fails, the others are cancelled. Can be called again, for more of the same run.

    `after`: SLURM job ids that must have ended first. `going_on`: this adds to a run that goes on even if nothing comes of it; without,
    a failure ends the run. Raises `ConfigError` with what SLURM objects to.
    """
    if config.cluster.kind is ClusterKind.local:
        return _submit_processes(specs, config, run)
    return _submit_arrays(specs, config, run, after, going_on)


def scripts(spec: JobSpec, config: FullConfig, run: RunFolder, largest: int, after: tuple[str, ...] = ()) -> list[str]:
    """The very texts that sbatch gets, but for the token in names and the ids of arrays that are not submitted yet."""
    texts = []
    for number, size in enumerate(waves(spec, largest), 1):
        name = f"{config.run.name}-{DRY_RUN_TOKEN}-{spec.role}-{number}"
        before = after if number == 1 else (f"ID_OF_{config.run.name}-{DRY_RUN_TOKEN}-{spec.role}-{number - 1}",)
        executor = _executor(_Writer, spec, config, run, name, before)
        executor.parameters["map_count"] = size
        texts.append(executor._make_submission_file_text(executor._submitit_command_str, ""))
    return texts


def describe(spec: JobSpec, config: FullConfig, run: RunFolder, after: tuple[str, ...] = ()) -> str:
    """What submission will do, for --dry-run: a line for each process that would be started, or the scripts that sbatch would get."""
    if config.cluster.kind is ClusterKind.local:
        lines = [f"# {spec.describe()}; submitit's local executor; run.max_hours={config.run.max_hours:g}"]
        return "\n".join(lines + [f"{local_command(run)}    # {spec.element}" for _ in range(spec.num_elements)])
    try:
        largest = max_array_size(queries.show_config())
    except SlurmError:  # a dry run needs no cluster
        largest = max_array_size({})
    texts = scripts(spec, config, run, largest, after)
    first = f"# {spec.describe()}; {len(texts)} array(s); the zeros in names stand for eight digits drawn at submission"
    return "\n".join([first, *texts])


def _executor(kind: type[submitit.SlurmExecutor], spec: JobSpec, config: FullConfig, run: RunFolder, name: str,
              after: tuple[str, ...]) -> submitit.SlurmExecutor:
    part = config.cluster.role(spec.role)
    folders = mounted(config, run)
    executor = kind(folder=run.jobs, python=python_command(part, folders))
    executor.update_parameters(
        job_name=name, time=spec.time_limit_s // 60, nodes=spec.nodes_per_element, ntasks_per_node=spec.tasks_per_node, wckey=None,
        array_parallelism=spec.throttle, stderr_to_stdout=True, signal_delay_s=config.cluster.signal_delay_s,
        dependency=f"afterany:{':'.join(after)}" if after else None,
        setup=[*waiting_lines(run, config), *setup_lines(spec, part)],
        # Where a node of a replica breaks, the rollout worker on another one still has samples to hand over.
        srun_args=srun_arguments(part, folders, as_one=spec.role != "inference" or spec.nodes_per_element == 1),
        additional_parameters={**sbatch_options(spec, part), "output": os.devnull, "requeue": True,
                               "signal": f"USR2@{config.cluster.signal_delay_s}"})
    return executor


def _submit_arrays(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder, after: tuple[str, ...], going_on: bool) -> list[submitit.Job]:
    records = ArrayRecords(run, config, going_on)
    jobs: list[submitit.Job] = []
    try:
        cluster = queries.show_config()
        largest, records.cluster_name = max_array_size(cluster), cluster.get("ClusterName", "")
        sizes = {spec.role: waves(spec, largest) for spec in specs}
        for spec in specs:
            before = after
            for size in sizes[spec.role]:
                # submitit prints what sbatch objects to, and raises it too.
                with undisturbed(), outside_any_job(), contextlib.redirect_stderr(io.StringIO()):
                    name = records.begin(spec, size)
                    executor = _executor(submitit.SlurmExecutor, spec, config, run, name, before)
                    array = executor.submit_array([spec.element] * size)
                    before = (array[0].job_id.split("_")[0],)
                    records.submitted(name, before[0])
                jobs += array
        records.complete()
    except BaseException as error:
        left = _take_back(records, run, error, going_on)
        if isinstance(error, (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError, SlurmError)):
            did = "did not accept" if _refused(error) else "did not say whether it accepts"
            raise SubmissionError(f"SLURM {did} {records.last}: {_words(error)}. {left} Correct cluster.*, or try again later") from error
        raise
    return jobs


def _take_back(records: ArrayRecords, run: RunFolder, error: BaseException, going_on: bool) -> str:
    """Cancel what this submission has brought into the queue; returns what is left there, in words. A run that has no other jobs has ended."""
    with undisturbed():
        if not going_on:
            run.end(f"submission failed: {_words(error)}", "launcher")
        try:
            queries.cancel(records.found())
        except SlurmError as second:
            return f"What was submitted before could not be cancelled ({second}): run headway stop {run.path}."
        lost = records.withdraw(_refused(error))
    if lost:
        return (f"SLURM may still queue {', '.join(lost)} in a while; what else was submitted has been cancelled. jobs.json keeps the name: "
                f"`headway watch` looks for it, and so does: headway stop {run.path}.")
    return "Nothing of this submission is left in the queue."


def _refused(error: BaseException) -> bool:
    """sbatch has said that there will be no such array. With any other words, or none, SLURM may have taken it."""
    return REFUSED in (said := str(error)) and not any(words in said for words in AWAY)


def _words(error: BaseException) -> str:
    return "; ".join(str(error).split("\n")).strip("; ") or type(error).__name__


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Signals that end the launcher wait until the end of this block: between sbatch's answer and its record nothing may come in.

    The mask is inherited: Ctrl-C does not reach sbatch either.
    """
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


@contextlib.contextmanager
def outside_any_job() -> Iterator[None]:
    """Without SLURM's variables: those of a job that this launcher runs in would shape the jobs it submits, and so would SBATCH_*."""
    kept = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with submitit.helpers.clean_env():
        os.environ.update(kept)
        yield


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """What is started inside writes to `path`: a process that stays must not hold a pipe open that this command's output goes into."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        with path.open("ab") as file:
            for number in kept:
                os.dup2(file.fileno(), number)
        yield
    finally:
        for number, own in kept.items():
            os.dup2(own, number)
            os.close(own)


def _submit_processes(specs: tuple[JobSpec, ...], config: FullConfig, run: RunFolder) -> list[submitit.Job]:
    jobs: list[submitit.Job] = []
    record: list[dict] = []
    # Inherited by the jobs: Ctrl-C and a closing terminal reach the launcher only, which then ends the run in order.
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    os.environ[GPUS] = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    try:
        with without_sigterm():  # a process that is started must stand in jobs.json, where it can be found
            for spec in specs:
                executor = submitit.LocalExecutor(folder=run.jobs)
                minutes = math.ceil(config.run.max_hours * 60) + (0 if config.evaluates else SAVING_MIN)
                executor.update_parameters(timeout_min=minutes, tasks_per_node=spec.tasks_per_node, stderr_to_stdout=True)
                with output_to(run.jobs / "controllers.log"):
                    submitted = executor.submit_array([spec.element] * spec.num_elements)
                for job in submitted:
                    jobs.append(job)
                    record.append({"name": spec.name, "job_id": job.job_id, "created": psutil.Process(int(job.job_id)).create_time(),
                                   "log": str(job.paths.stdout)})
                content = {"cluster": config.cluster.kind.value, "complete": spec is specs[-1], "time": time.time(), "host": socket.gethostname(),
                           "jobs": record}
                write_atomic(run.submitted, json.dumps(content, indent=2).encode())
    except BaseException as error:
        run.end(f"submission failed: {error}", "launcher")
        liveness.kill(run)
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return jobs

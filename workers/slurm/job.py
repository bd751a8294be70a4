"""An element's own view of SLURM: who it is, how long it may run, and the few things it asks SLURM to do."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from dataclasses import dataclass
from datetime import datetime

from workers.config import ConfigError
from workers.run.folder import RunFolder
from workers.slurm.command import COMMENT, ENDED, SlurmError, user_name
from workers.slurm.command import run as run_command

ROLES = ("train", "inference", "reward")
FAILED = ("FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "LAUNCH_FAILED")
EARLY_S = 90.0
"""SLURM may signal that much earlier than asked for."""


@dataclass(frozen=True)
class Place:
    """A process's place among the ranks of its element: `job` and `restarts` are this element's alone, `name` is what people write."""

    job: str
    name: str
    array: str
    restarts: int
    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class SlurmElement(Place):
    """This process's place: `job` is SLURM's own id of the element, `name` the array's id, an underscore and the task's."""

    end_time: float
    """When the time limit is reached, seconds since 1970."""

    def is_walltime(self, now: float, signal_delay_s: float) -> bool:
        """Whether a signal that comes now announces the time limit; otherwise it is a preemption."""
        return self.end_time - now <= signal_delay_s + EARLY_S


def current() -> SlurmElement:
    """Read from the environment. Raises `ConfigError` outside a SLURM job."""
    variables = os.environ
    if "SLURM_JOB_ID" not in variables or "SLURM_PROCID" not in variables:
        raise ConfigError("cluster.kind=slurm: this process is in no SLURM job step (SLURM_JOB_ID, SLURM_PROCID). Start runs with `headway`")
    job = variables["SLURM_JOB_ID"]
    array = variables.get("SLURM_ARRAY_JOB_ID", job)
    return SlurmElement(
        job=job, name=f"{array}_{variables.get('SLURM_ARRAY_TASK_ID', 0)}", array=array, restarts=int(variables.get("SLURM_RESTART_COUNT", 0)),
        rank=int(variables["SLURM_PROCID"]), world_size=int(variables.get("SLURM_NTASKS", 1)),
        local_rank=int(variables.get("SLURM_LOCALID", 0)), end_time=_end_time(job))


def _end_time(job: str) -> float:
    if "SLURM_JOB_END_TIME" in os.environ:
        return float(os.environ["SLURM_JOB_END_TIME"])
    text = run_command("squeue", "-h", "-j", job, "-o", "%e").stdout.strip()
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return float("inf")  # N/A: a partition without a limit


def is_being_preempted(job: str) -> bool:
    """Whether SLURM has told this job to make room for another one.

    A job that is being cancelled is COMPLETING; requeued, it would come back to life.
    """
    # Not `scontrol show job`: it shows what users write too, a job's name and command, in which anything may stand.
    lines = run_command("squeue", "-h", "--array", "-j", job, "-O", "JobID:20,State:20,PreemptTime:30", tolerate=ENDED).stdout.splitlines()
    shown = next((fields for line in lines if (fields := line.split())[:1] == [job]), [])
    return shown[1:2] == ["RUNNING"] and shown[2:] not in ([], ["N/A"], ["None"], ["Unknown"])


def is_to_come_back(element: SlurmElement, number: signal.Signals, at: float, signal_delay_s: float) -> bool:
    """Whether the element that was told to go by signal `number` must put itself back into the queue: SLURM takes one that exits
    within its grace time for complete. After SIGUSR2 near its time limit, and after SIGTERM without a preemption, it must not."""
    try:
        if is_being_preempted(element.job):
            return True
    except SlurmError as error:
        print(f"SLURM could not be asked why this element has to go: {error}", flush=True)
    return number is signal.SIGUSR2 and not element.is_walltime(at, signal_delay_s)


def requeue(job: str) -> None:
    """Put this element back into the queue; SLURM then kills it."""
    run_command("scontrol", "requeue", job)


def requeue_held(job: str) -> None:
    """The same, but it stays in the queue until it is released."""
    run_command("scontrol", "requeuehold", job)


def hold(array: str) -> None:
    """Keep the waiting elements of an array from starting."""
    with contextlib.suppress(SlurmError):  # as `release`
        run_command("scontrol", "hold", array)


def release(array: str) -> None:
    """Let held elements start."""
    with contextlib.suppress(SlurmError):  # it fails wherever an element of the array has ended, though it releases the others
        run_command("scontrol", "release", array)


def cancel_waiting(arrays: list[str]) -> None:
    """Cancel the elements that have not started."""
    for array in arrays:
        run_command("scancel", "--state=PENDING", array, tolerate=ENDED)  # not --quiet: with it an array that has ended fails without a word


def cancel_waiting_of(run: RunFolder) -> None:
    """Cancel the run's elements that wait in the queue, so that none starts in the place of one that leaves; if SLURM is away, say so."""
    try:
        cancel_waiting([array for role in ROLES for array in arrays(run, role)])
    except SlurmError as error:
        print(f"waiting elements could not be cancelled: {error}; each will see that the run has ended, and leave", flush=True)


def arrays(run: RunFolder, role: str) -> list[str]:
    """The ids of the arrays of `role`; where the run folder cannot be read, of those in the queue whose names are like this element's, which is
    RUN-TOKEN-ROLE-NUMBER. Raises `SlurmError`."""
    with contextlib.suppress(OSError):
        if run.submission():
            return run.arrays(role)
    kin = f"{os.environ.get('SLURM_JOB_NAME', '').rsplit('-', 2)[0]}-{role}-"
    lines = run_command("squeue", "-h", "--me", "-o", "%F %j").stdout.splitlines() if kin.count("-") > 2 else []
    return sorted({line.split()[0] for line in lines if line.split(maxsplit=1)[-1].startswith(kin)}, key=int)


def comment(text: str) -> None:
    """Have SLURM show `text` beside this element, '' to remove it: what it waits for while the run folder cannot be written to."""
    if job := os.environ.get("SLURM_JOB_ID"):
        with contextlib.suppress(SlurmError):
            run_command("scontrol", "update", f"JobId={job}", f"Comment={COMMENT + text if text else ''}", patience_s=0)


def comment_later(text: str) -> None:
    """The same, without waiting for SLURM's answer."""
    threading.Thread(target=comment, args=(text,), name="comment", daemon=True).start()


def cancelled_by(arrays: list[str], since: float) -> str:
    """Who has cancelled what has ended last of these arrays `since` (seconds since 1970), in words; '' where nobody has, or SLURM's accounting does
    not say yet. Without accounting, the queue shows for some minutes what was cancelled before it began. Raises `SlurmError`."""
    try:
        lines = _accounts(arrays, since, "End,State")
    except SlurmError:
        shown = run_command("squeue", "-h", "--states=CANCELLED", "-j", ",".join(arrays), "-o", "%A", tolerate=ENDED).stdout.strip()
        return "somebody (there is no accounting that says by whom)" if shown else ""
    ended = [line.split("|", 1) for line in lines if line[:1].isdigit()]
    last = max((end for end, _ in ended), default="")
    return next((user_name(state.split()[2]) for end, state in ended if end == last and state.startswith("CANCELLED by ")), "")


def failures(arrays: list[str], since: float) -> set[str]:
    """The jobs of these arrays that have failed after `since` (seconds since 1970), as accounting has it; none where there is none."""
    with contextlib.suppress(SlurmError):
        return {job for job, _, state in (line.partition("|") for line in _accounts(arrays, since, "JobIDRaw,State")) if state.startswith(FAILED)}
    return set()


def _accounts(arrays: list[str], since: float, columns: str) -> list[str]:
    """Every incarnation of these arrays' elements that had not ended before `since`, from accounting. Raises `SlurmError`."""
    begin = datetime.fromtimestamp(since).strftime("%Y-%m-%dT%H:%M:%S")
    return run_command("sacct", "-n", "-X", "-D", "-P", "-j", ",".join(arrays), f"--starttime={begin}", f"--format={columns}",
                       patience_s=0).stdout.splitlines() if arrays else []


def states(arrays: list[str]) -> dict[str, str]:
    """The state of each element still in the queue, by its name; those that wait stand together, as 12_[4-9%3]."""
    return _states(arrays, "%F_%K %T")


def job_states(arrays: list[str]) -> dict[str, str]:
    """The same, by SLURM's own id of each element's job."""
    return _states(arrays, "%A %T", "--array")  # else those that have been requeued stand with those that have never run


def _states(arrays: list[str], form: str, *options: str) -> dict[str, str]:
    if not arrays:
        return {}
    lines = run_command("squeue", "-h", *options, "-j", ",".join(arrays), "-o", form, tolerate=ENDED).stdout.splitlines()
    return dict(words for line in lines if len(words := line.rsplit(maxsplit=1)) == 2)

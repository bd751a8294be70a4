"""Who trains after an element: the next one of the arrays, or one that a `headway watch` submits. Where nobody does, the run ends and says why, so
that no element waits for ever."""

from __future__ import annotations

import contextlib
import time

from workers.run import checkpoints, incarnations
from workers.run.folder import RunFolder
from workers.slurm import job
from workers.slurm.command import SlurmError

CANCELLED_S = 6.0


def is_followed(run: RunFolder, but: str = "") -> bool:
    """Whether an element of training runs or waits, but for the job `but`, or somebody keeps the run who would submit one. So where SLURM does not
    say."""
    try:
        states = job.job_states(job.arrays(run, "train"))
    except SlurmError as error:
        print(f"SLURM could not be asked who trains next: {error}", flush=True)
        return True
    return any(number != but and state != "COMPLETING" for number, state in states.items()) or run.is_supervised()


def cancellation(run: RunFolder) -> str:
    """That a person has cancelled what was left of training, as the cause of an outcome; '' where that is not so, or not known."""
    try:
        arrays, resumed_at = job.arrays(run, "train"), 0.0
        with contextlib.suppress(OSError):
            resumed_at = run.resumed_at()
        who = job.cancelled_by(arrays, resumed_at)
    except SlurmError:
        return ""
    return f"stopped: training was cancelled by {who} (scancel)" if who else ""


def end_if_cancelled(run: RunFolder, reported_by: str, job_id: str) -> None:
    """For an element of training, the job `job_id`, that was told to end: whoever has cancelled all that was left of training wants no other one, so
    that the run ends in order, and says by whom. Accounting lags by seconds."""
    if run.known_end() is not None or is_followed(run, job_id):
        return
    deadline = time.monotonic() + CANCELLED_S
    while not (cause := cancellation(run)) and time.monotonic() < deadline:
        time.sleep(0.5)
    if cause:
        end(run, reported_by, cause)


def end(run: RunFolder, reported_by: str, cause: str = "") -> None:
    """End the run, as nobody trains any more, and what waits of it. `cause`: '' where that is to be found out. Where the run folder does not take
    the outcome, it is said in SLURM's comment."""
    try:
        cause = cause or cancellation(run)
        state = "drained" if cause.startswith("stopped") else ""
        if not cause:
            cause, state = _last_words(run)
        run.end(cause, reported_by, state if checkpoints.can_go_on(run) else "")
        print(f"the run has ended: {cause}", flush=True)
    except OSError as error:
        print(f"the run ends, and that cannot be put on record ({error}): {cause}", flush=True)
        job.comment(f"the run has ended, not on record ({error.strerror}): {cause}")
    job.cancel_waiting_of(run)


def _last_words(run: RunFolder) -> tuple[str, str]:
    """How training was left, and the state of the run that follows of it."""
    past = incarnations.history(run)
    nobody = "no element of training is left in SLURM's queue, and no `headway watch` submits one"
    last = past[-1].end if past else None
    if last is not None and last.how in incarnations.IN_ORDER:
        return f"{nobody}. The last one ended in order ({last.how})", "drained"
    if last is None:
        return f"{nobody}. {'The last one was killed without a word' if past else 'None has begun: see the logs in jobs/'}", ""
    return f"{nobody}. The last one has crashed: {last.cause}", ""

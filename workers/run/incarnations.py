"""The incarnations of a run's training job: who holds the run, how the earlier ones ended, and whether it is time to give up.

    epochs/000007       Claim: which job, where, from which step       created by link(2): one claimant
    epochs/000007.end   End: how and why

An incarnation without an end was killed hard. If SLURM requeued its job (preemption, node failure), that was nobody's fault.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from workers.run.files import write_atomic, write_once
from workers.run.folder import RunFolder

IN_ORDER = ("finished", "walltime", "preempted", "terminated", "stopped", "drained", "fenced")


class Claim(msgspec.Struct, frozen=True):
    """Who began an incarnation. `job`: SLURM's id of the element's job ('' on one machine); `restarts`: how often it was requeued; `trained_s`: what
    training had had before, in seconds, as far as earlier ones were seen."""

    epoch: int
    job: str
    element: str
    restarts: int
    host: str
    pid: int
    time: float
    step: int
    trained_s: float = 0.0


class End(msgspec.Struct, frozen=True):
    """How an incarnation ended: one of `IN_ORDER`, or 'crashed'. `checkpoint`: the step of the newest checkpoint, -1 for none."""

    how: str
    cause: str
    step: int
    checkpoint: int
    time: float


class Moment(msgspec.Struct, frozen=True):
    """When a record was written, seconds since 1970: of an End, and of status.json."""

    time: float = 0.0


class Incarnation(msgspec.Struct, frozen=True):
    """One of them; `end` is None while it lives, and if it was killed."""

    claim: Claim
    end: End | None


def claim(run: RunFolder, element: str, job: str, restarts: int, host: str, pid: int, step: int) -> int:
    """Begin an incarnation; returns its epoch, which fences off all earlier ones."""
    while True:
        epoch = run.newest_epoch() + 1
        record = Claim(epoch, job, element, restarts, host, pid, time.time(), step, _trained_s(run))
        if write_once(run.epochs / f"{epoch:06d}", msgspec.json.encode(record)):
            return epoch


def _trained_s(run: RunFolder) -> float:
    """What training has had in all incarnations; one without an end lasted until it last wrote its status."""
    if not (newest := run.newest_epoch()):
        return 0.0
    trained_s = 0.0
    with contextlib.suppress(FileNotFoundError, msgspec.DecodeError):  # it was never seen to train
        claim, ended = claim_of(run, newest), run.epochs / f"{newest:06d}.end"
        trained_s = claim.trained_s
        trained_s += max(0.0, msgspec.json.decode((ended if ended.exists() else run.status).read_bytes(), type=Moment).time - claim.time)
    return trained_s


def claim_of(run: RunFolder, epoch: int) -> Claim:
    """The claim of an incarnation. Raises FileNotFoundError."""
    return msgspec.json.decode((run.epochs / f"{epoch:06d}").read_bytes(), type=Claim)


def correct(run: RunFolder, epoch: int, step: int) -> None:
    """Have the claim of `epoch` say that it began from `step`. For whoever holds it alone."""
    write_atomic(run.epochs / f"{epoch:06d}", msgspec.json.encode(msgspec.structs.replace(claim_of(run, epoch), step=step)))


def record_end(run: RunFolder, epoch: int, how: str, cause: str, step: int, checkpoint: int) -> None:
    """Say how the incarnation ended; the first word counts."""
    run.write_last(run.epochs / f"{epoch:06d}.end", msgspec.json.encode(End(how, cause, step, checkpoint, time.time())))


def history(run: RunFolder) -> list[Incarnation]:
    """All incarnations, oldest first."""
    found = []
    for path in sorted((path for path in run.epochs.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)):
        ended = path.with_suffix(".end")
        end = msgspec.json.decode(ended.read_bytes(), type=End) if ended.exists() else None
        found.append(Incarnation(msgspec.json.decode(path.read_bytes(), type=Claim), end))
    return found


def since_resumed(run: RunFolder) -> list[Incarnation]:
    """The incarnations since the run was started or resumed: what crashed before that does not count any more."""
    resumed_at = run.resumed_at()
    return [incarnation for incarnation in history(run) if incarnation.claim.time > resumed_at]


def consecutive_crashes(incarnations: list[Incarnation], step_now: int, requeued: set[str]) -> int:
    """How many incarnations in a row have crashed, or were killed, without a new checkpoint in between. Pure.

    `step_now`: the step of the newest checkpoint. `requeued`: jobs that SLURM is about to start again.
    """
    count, next_step = 0, step_now
    for position in reversed(range(len(incarnations))):
        claim, end = incarnations[position].claim, incarnations[position].end
        if end is not None and end.how in IN_ORDER:
            break
        started_again = any(later.claim.job == claim.job and later.claim.restarts > claim.restarts for later in incarnations[position + 1:])
        if end is not None or not (claim.job and (started_again or claim.job in requeued)):
            count += 1
        if next_step > claim.step:
            break
        next_step = claim.step
    return count

"""A run folder that is full, or away, for a while: disks are freed, file servers fail over. Who meets that waits, says so, and gives up after
`run.outage_minutes`.

    Outage      how long it has lasted. Pure
    patiently   does something for somebody who can do nothing else meanwhile
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

from workers.run.files import is_full
from workers.run.folder import RunFolder

AWAY = {errno.EIO, errno.ESTALE, errno.EROFS, errno.ENOTCONN, errno.ETIMEDOUT, errno.ENODEV, errno.ENXIO, errno.EHOSTDOWN, errno.EHOSTUNREACH,
        errno.ECONNREFUSED, errno.ECONNRESET, errno.ESHUTDOWN, errno.EREMOTEIO}
NO_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
NEXT_S = 1.0
Result = TypeVar("Result")


class OutageTooLong(OSError):
    """The run folder has been full or away for as long as this process waits. Its text says so."""


def is_outage(run: RunFolder, error: BaseException) -> bool:
    """Whether it is that the run folder is full, or away: it cannot be read, is not there at all, or nothing can be opened now."""
    if not isinstance(error, OSError):
        return False
    return is_full(error) or error.errno in AWAY | NO_DESCRIPTORS or (error.errno in (errno.ENOENT, errno.ENOTDIR) and not run.epochs.exists())


def disk_error(error: BaseException | None) -> OSError | None:
    """What the disk had to say, of an error that tells it in words of its own (of weights, of models); None where it was something else."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error


def words(run: RunFolder, error: OSError) -> str:
    """What to say of it."""
    if error.errno in NO_DESCRIPTORS:
        return f"run.dir={run.path}: nothing there can be opened, as all descriptors of this process are in use ({error.strerror})"
    return run.full_disk() if is_full(error) else f"run.dir={run.path}: cannot be reached ({error.strerror or error})"


class Outage:
    """How long the run folder has been full or away; times are seconds of one clock. `why`: in words, '' while it is neither."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s, self._since = limit_s, 0.0
        self.why = ""

    def failed(self, why: str, now: float) -> None:
        """An attempt has failed."""
        if not self.why:
            self._since = now
        self.why = why

    def worked(self) -> None:
        """It can be read and written again."""
        self.why = ""

    def lasted_s(self, now: float) -> float:
        """Since when it is so; 0 while it is not."""
        return now - self._since if self.why else 0.0

    def is_too_long(self, now: float) -> bool:
        """Whether it is time to give up."""
        return bool(self.why) and now - self._since >= self._limit_s


def say(text: str) -> None:
    """In this process's log: what is waited for, or that it is over."""
    print(text or "the run folder can be used again", flush=True)


def patiently(run: RunFolder, work: Callable[[], Result], tell: Callable[[str], object] = say, hurry: Callable[[], bool] = lambda: False) -> Result:
    """The result of `work`, which is tried again for `run.patience_s` while the run folder is full or away, or until `hurry`; `tell` gets what is
    waited for, and '' when it is over. Raises `OutageTooLong`, and what else `work` does."""
    outage = Outage(run.patience_s)
    while True:
        try:
            result = work()
        except (OSError, RuntimeError) as error:
            now, disk = time.monotonic(), disk_error(error)
            if not run.patience_s or hurry() or disk is None or not is_outage(run, disk):
                raise
            if not outage.why:
                tell(f"{words(run, disk)}. Waiting for it, {run.patience_s:g} s at most (run.outage_minutes)")
            outage.failed(words(run, disk), now)
            if outage.is_too_long(now):
                raise OutageTooLong(disk.errno, f"{outage.why}, and that for {outage.lasted_s(now):.0f} s (run.outage_minutes)") from error
            time.sleep(NEXT_S)
            continue
        if outage.why:
            tell("")
        return result

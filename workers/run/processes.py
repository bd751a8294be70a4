"""Processes that end with their parent, say how they died, and do not die of a log that takes nothing."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys

import psutil

from workers.run.folder import RunFolder
from workers.run.texts import well_formed

GPUS = "HEADWAY_GPUS"
"""The launcher's CUDA_VISIBLE_DEVICES for jobs on its machine, or 'all': submitit's local executor hides all GPUs from them."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
PARENT_DIED = signal.SIGUSR1
"""Tells a coordinator that its trainer is gone. Not SIGTERM, nor SIGUSR2: SLURM sends those to every process of a job."""
TOLD_TO_END = "it was told to end by SIGTERM: its job was cancelled, or its parent has died"
OUT_OF_TIME = "it was told to end by SIGUSR2: the time limit of its job is near, or its place is needed"


def control(option: int, value: int) -> None:
    """Linux prctl(2) with one value. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send signal `number` to this process when process `parent`, its parent, dies (PR_SET_PDEATHSIG).

    The kernel means the *thread* that started this process: start it from one that stays.

    Exits at once if the parent is dead already.
    """
    control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit(f"parent process {parent} is gone: the parent of this process is {os.getppid()}")


def adopt_orphans() -> None:
    """Make this process the parent of whatever is orphaned below it, so that all of it can be found (PR_SET_CHILD_SUBREAPER)."""
    control(_PR_SET_CHILD_SUBREAPER, 1)


def one_thread() -> dict[str, str]:
    """Environment variables that keep numerical libraries to the thread that calls them."""
    return {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}


def enlist(run: RunFolder) -> None:
    """Record this process in the run folder by its id and time of creation, so that `headway stop` can find it."""
    (run.processes / f"{os.getpid()}").write_text(repr(psutil.Process().create_time()))


def describe_exit(returncode: int) -> str:
    """How a child ended, in words: 'exited with status 1', 'was killed by SIGKILL'."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"


def first_cause(error: BaseException) -> str:
    """The text of an error, or of the first one in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return well_formed(str(error)) or type(error).__name__


def distinct(visible: str) -> str:
    """CUDA_VISIBLE_DEVICES with every GPU once: on one machine a GPU that both roles share is named twice, which CUDA does not take."""
    return ",".join(dict.fromkeys(visible.split(",")))


class LogStream(io.RawIOBase):
    """Standard output that lies in the run folder: what finds no room there is counted, and that is said once something does again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lost = descriptor, 0

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def write(self, content: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Take all of `content`, whatever becomes of it."""
        given = bytes(content)
        try:
            if self._lost:
                os.write(self._descriptor, f"[{self._lost} bytes of this log found no room]\n".encode())
                self._lost = 0
            written = os.write(self._descriptor, given)
        except OSError:
            written = 0
        self._lost += len(given) - written
        return len(given)


def keep_logging() -> None:
    """Have this process's standard output and error be such streams."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(LogStream(descriptor)), errors="backslashreplace", line_buffering=True))

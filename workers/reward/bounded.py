"""Running what may hang, crash or eat memory, because a model wrote its input: in a forked copy that is killed in time.

Symbolic algebra has no bound of its own: `simplify` may take hours, and 10**10**10 never comes back from C code, where no
signal handler runs. A failure of that kind is the completion's, not the infrastructure's, so it must not end the reward
process (which the pool would count as no score): only its copy dies, and the completion gets none of the credit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
from collections.abc import Callable
from pathlib import Path

CPU_S = 3
WALL_S = 8.0
EXTRA_MEMORY_BYTES = 512 * 1024 * 1024
_REPLY = struct.Struct("d")


def bounded(function: Callable[[], float]) -> float | None:
    """What `function` returns; None if it raised, crashed, or took over `CPU_S` of processor, `WALL_S` of time or `EXTRA_MEMORY_BYTES`.

    Takes some milliseconds. Nothing that `function` changes in memory stays. Call it where no other thread runs.
    """
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            _confine()
            os.write(send, _REPLY.pack(function()))
        finally:  # whatever is raised, this copy must not return into its caller's code
            os._exit(0)
    os.close(send)
    try:
        reply = _receive(receive)
    finally:
        os.close(receive)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return _REPLY.unpack(reply)[0] if len(reply) == _REPLY.size else None


def _confine() -> None:
    """Limit this process, so that it ends soon even where nobody is left to kill it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + EXTRA_MEMORY_BYTES
    for limit, value in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lowest, lowest))


def _receive(fd: int) -> bytes:
    """What comes over `fd` before it is closed or `WALL_S` have passed; all of a reply comes at once."""
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    return os.read(fd, _REPLY.size) if waiter.poll(WALL_S * 1000) else b""

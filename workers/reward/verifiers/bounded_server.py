"""The server of bounded.py: `python -m workers.reward.verifiers.bounded_server MODULE`. A process without threads, with MODULE imported, that
forks a confined copy of itself for each answer, and kills it in time. One order a line on standard input, one reply a line on standard output.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from workers.run.processes import end_with_parent

EXTRA_MEMORY_BYTES = 512 * 1024 * 1024
_REPLY = struct.Struct("d")


def main(module: str) -> None:
    """Serve until standard input is closed. A judge that raises ends it: its reference was looked at before."""
    orders, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull) as nothing:  # no copy reads orders, and what one prints is no reply
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    importlib.import_module(module)
    replies.write("null\n")
    for line in orders:
        order = json.loads(line)
        module, _, name = order["judge"].partition(":")
        judge = getattr(importlib.import_module(module), name)(order["reference"])
        replies.write(json.dumps(_in_a_copy(judge, order["answer"], order["cpu_s"], order["wall_s"])) + "\n")


def _in_a_copy(judge: Callable[[str], float], answer: str, cpu_s: int, wall_s: float) -> float | None:
    """What `judge` says, or None. Nothing that it changes in memory stays."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("this process has threads, and must not fork: a module that it has imported starts them")
    receive, send = os.pipe()
    server, child = os.getpid(), os.fork()
    if child == 0:
        try:
            end_with_parent(server)
            os.close(receive)
            _confine(cpu_s)
            os.write(send, _REPLY.pack(judge(answer)))
        finally:  # whatever is raised, this copy must not return into its caller's code
            os._exit(0)
    os.close(send)
    try:
        reply = _receive(receive, wall_s)
    finally:
        os.close(receive)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return _REPLY.unpack(reply)[0] if len(reply) == _REPLY.size else None


def _confine(cpu_s: int) -> None:
    """Limit what this process takes, even where nobody is left to kill it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + EXTRA_MEMORY_BYTES
    for limit, value in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(limit)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (lowest, lowest))


def _receive(fd: int, wall_s: float) -> bytes:
    """What comes over `fd` before it is closed or `wall_s` have passed; all of a reply comes at once."""
    waiter = select.poll()
    waiter.register(fd, select.POLLIN)
    return os.read(fd, _REPLY.size) if waiter.poll(wall_s * 1000) else b""


if __name__ == "__main__":
    main(sys.argv[1])

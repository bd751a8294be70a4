"""One reward process: `python -m workers.reward.process FD PARENT MEMORY_MB VERIFIER`, started by the pool (child.py).

    pool --Request--> [import the verifier] --Loaded--> [run it] --Scored | Failed--> pool

The process is small (no torch) and made to be killed: it leads its own session, dies with the thread that started it
(PR_SET_PDEATHSIG), and adopts whatever its verifiers leave behind (PR_SET_CHILD_SUBREAPER) so that nothing of theirs
outlives their request: leftover children are killed before the score is sent. Its memory is bounded by RLIMIT_AS.
Messages go over the inherited socket FD; standard output is the worker's standard error, so a verifier may print.

What is not covered: processes that a verifier has put outside this process group live on if this process is killed
by someone other than the pool. The SLURM job's end removes those.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import resource
import signal
import socket
import sys
import traceback

import msgspec

from workers.processes import control, end_with_parent
from workers.reward import tree, verifiers
from workers.reward.messages import LENGTH_BYTES, Failed, Loaded, Reply, Request, Scored, frame, frame_length

PR_SET_CHILD_SUBREAPER = 36
MAX_CAUSE_CHARS = 1000


def main(arguments: list[str]) -> None:
    """Answer requests until the pool closes the socket."""
    fd, parent, memory_mb = (int(value) for value in arguments[:3])
    _confine(parent, memory_mb)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    # A forked copy of this process that returns from the verifier must not answer in its place.
    os.register_at_fork(after_in_child=channel.close)
    loaded: dict[str, verifiers.Verifier] = {}
    _load(arguments[3], loaded)  # meanwhile the first completions are generated; a failure shows at the first request
    while (body := _receive(channel)) is not None:
        request = msgspec.msgpack.decode(body, type=Request)
        reply: Reply | None = _load(request.verifier, loaded)
        if reply is None:
            channel.sendall(frame(Loaded()))
            reply = _run(loaded[request.verifier], request)
            _sweep()
        channel.sendall(frame(reply))


def _confine(parent: int, memory_mb: int) -> None:
    end_with_parent(parent)
    control(PR_SET_CHILD_SUBREAPER, 1)
    limit = memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(name: str, loaded: dict[str, verifiers.Verifier]) -> Failed | None:
    try:
        if name not in loaded:
            loaded[name] = verifiers.load(name)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything when imported; the pool reports it
        return Failed(_describe(error))
    return None


def _run(verifier: verifiers.Verifier, request: Request) -> Scored | Failed:
    try:
        score: object = verifier(request.prompt, request.completion, request.reference)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a verifier may raise anything; the pool reports it and replaces this process
        return Failed(_describe(error))
    if not isinstance(score, numbers.Real):
        return Failed(f"returned {score!r:.200}, which is not a number; a verifier must return a number from 0 to 1")
    value = float(score)
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        return Failed(f"returned {value}; a verifier must return a number from 0 to 1")
    return Scored(value)


def _describe(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}"[:MAX_CAUSE_CHARS] + place


def _sweep() -> None:
    """Kill and reap every process that the verifier left behind. The pool's deadline bounds this too."""
    while _has_children():
        for child in tree.descendants(os.getpid()):
            tree.send(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # a grandchild: it becomes ours when its parent is gone
                os.waitpid(child, 0)


def _has_children() -> bool:
    """Whether this process has children; one that has ended is reaped."""
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return False
    return True


def _receive(channel: socket.socket) -> bytes | None:
    head = _exactly(channel, LENGTH_BYTES)
    return None if head is None else _exactly(channel, frame_length(head))


def _exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    """The next `num_bytes` bytes, or None if the pool closed the socket."""
    data = bytearray()
    while len(data) < num_bytes:
        piece = channel.recv(min(num_bytes - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


if __name__ == "__main__":
    main(sys.argv[1:])

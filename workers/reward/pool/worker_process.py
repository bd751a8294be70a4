"""One reward process: `python -m workers.reward.pool.worker_process FD PARENT SETTINGS`, started by the pool (process_handle.py).

    pool --Score | Execute--> [import the function] --Loaded--> [run it] --Scored | Executed | Failed--> pool

The process is small (no torch) and made to be killed: it leads its own session, dies with the thread that started it
(PR_SET_PDEATHSIG), and adopts whatever its verifiers leave behind (PR_SET_CHILD_SUBREAPER) so that nothing of theirs
outlives their request: leftover children are killed before the score is sent, but for those that serve later requests too
(`process_tree.keep`: the sandbox's server), which die with this process. Its memory is bounded by RLIMIT_AS.
Messages go over the inherited socket FD; standard output is the worker's standard error, so a verifier may print.

What is not covered: processes that a verifier has put outside this process group live on if this process is killed
by someone other than the pool. The SLURM job's end removes those.
"""

from __future__ import annotations

import math
import numbers
import os
import resource
import socket
import sys
from collections.abc import Callable

import msgspec

from workers.config import ConfigError
from workers.reward.code import sandboxes
from workers.reward.pool.messages import (
    LENGTH_BYTES,
    Execute,
    Executed,
    Failed,
    Load,
    Loaded,
    Reply,
    Request,
    Score,
    Scored,
    Settings,
    frame,
    frame_length,
)
from workers.reward.verifiers import registry, reward_model
from workers.run import process_tree
from workers.run.processes import adopt_orphans, end_with_parent
from workers.run.user_code import told


def main(arguments: list[str]) -> None:
    """Answer requests until the pool closes the socket."""
    fd, parent = (int(value) for value in arguments[:2])
    settings = msgspec.json.decode(arguments[2], type=Settings)
    _confine(parent, settings.reward.memory_mb)
    sandboxes.configure(settings.sandbox, settings.reward.timeout_s)
    reward_model.configure(settings.reward.model)
    channel = socket.socket(fileno=fd)
    channel.set_inheritable(False)
    # A forked copy of this process that returns from the verifier must not answer in its place.
    os.register_at_fork(after_in_child=channel.close)
    loaded: dict[str, Callable[..., object]] = {}
    tried: set[str] = set()
    _load(settings.reward.verifier, loaded)  # meanwhile the first completions are generated; a failure shows at the first request
    while (body := _receive(channel)) is not None:
        request: Request = msgspec.msgpack.decode(body, type=Request)
        reply: Reply = _load(request.function, loaded) or (Loaded() if request.function in tried else _try_out(request.function))
        if isinstance(reply, Loaded):
            tried.add(request.function)
        if isinstance(reply, Loaded) and not isinstance(request, Load):
            channel.sendall(frame(reply))
            reply = _run(loaded[request.function], request)
        process_tree.sweep()  # the pool's deadline bounds this too
        channel.sendall(frame(reply))


def _confine(parent: int, memory_mb: int) -> None:
    end_with_parent(parent)
    adopt_orphans()
    limit = memory_mb * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _load(name: str, loaded: dict[str, Callable[..., object]]) -> Failed | None:
    try:
        if name not in loaded:
            loaded[name] = registry.load(name)
    except ConfigError as error:
        return Failed(str(error))
    return None


def _try_out(name: str) -> Loaded | Failed:
    """What the function's modules say of this node, those that have a `check_node`."""
    try:
        for module in registry.modules(name):
            getattr(sys.modules[module], "check_node", lambda: None)()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's module may raise anything; the pool reports it
        return Failed(told(error))
    return Loaded()


def _run(function: Callable[..., object], request: Score | Execute) -> Scored | Executed | Failed:
    try:
        if isinstance(request, Execute):
            return _output(function(request.code))
        return _score(function(request.prompt, request.completion, request.reference))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a verifier may raise anything; the pool reports it and replaces this process
        return Failed(told(error))


def _score(score: object) -> Scored | Failed:
    if not isinstance(score, numbers.Real):
        return Failed(f"returned {score!r:.200}, which is not a number; a verifier must return a number from 0 to 1")
    value = float(score)
    if not (math.isfinite(value) and 0.0 <= value <= 1.0):
        return Failed(f"returned {value}; a verifier must return a number from 0 to 1")
    return Scored(value)


def _output(output: object) -> Executed | Failed:
    return Executed(output) if isinstance(output, str) else Failed(f"returned {output!r:.200}, which is not text")


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

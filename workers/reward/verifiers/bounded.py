"""Running what may hang, crash or eat memory, because a model wrote its input: in a copy of a process that is killed in time.

    this process --order--> server (bounded_server.py) --fork--> copy: confined, judges the answer
                 <------------- its score, or none --------------'

Symbolic algebra has no bound of its own: `simplify` may take hours, and 10**10**10 never comes back from C code, where no
signal handler runs. A failure of that kind is the completion's, not the infrastructure's, so it must not end the reward
process (which the pool would count as no score): only the copy dies, and the completion gets none of the credit.

This process may have threads, of a user's verifier for one, and a copy of such a process finds the locks of its other threads held for ever.
So the copies are made by a server that has none. It is started at the first need, serves this process alone and ends when its orders do.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from workers.run import process_tree
from workers.run.processes import describe_exit, one_thread

CPU_S = 3
WALL_S = 8.0

Judge = Callable[[str], Callable[[str], float]]
"""A module's function: for a reference, which is trusted, what scores an answer, which is not."""

_lock = threading.Lock()
_server: subprocess.Popen[str] | None = None


def bounded(judge: Judge, reference: str, answer: str) -> float | None:
    """`judge(reference)(answer)`; None if the latter raised, crashed, or took over `CPU_S` of processor, `WALL_S` of time or 512 MiB.

    Takes some milliseconds where the server runs already. Raises `RuntimeError` if that ends, as it does where `judge` raises.
    """
    order = {"judge": f"{judge.__module__}:{judge.__name__}", "reference": reference, "answer": answer, "cpu_s": CPU_S, "wall_s": WALL_S}
    with _lock, _ended_if_interrupted():
        server = _started(judge.__module__)
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: there is no reply either
            server.stdin.write(json.dumps(order) + "\n")
            server.stdin.flush()
        return _reply(server)


def start(judge: Judge) -> None:
    """Have the server there, with the module of `judge` imported: what that takes counts for no answer then. Raises `RuntimeError`."""
    with _lock, _ended_if_interrupted():
        _started(judge.__module__)


@contextlib.contextmanager
def _ended_if_interrupted() -> Iterator[None]:
    """A reply that nobody has read must not become the answer to the next order: whatever comes in between, the next one has a new server."""
    global _server
    try:
        yield
    except BaseException:
        if _server is not None:
            _server.kill()
            _server.wait()
            _server = None
        raise


def _started(module: str) -> subprocess.Popen[str]:
    global _server
    if _server is None or _server.poll() is not None:
        environment = {**os.environ, **one_thread(), "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        _server = subprocess.Popen([sys.executable, "-m", "workers.reward.verifiers.bounded_server", module], env=environment, text=True,
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        process_tree.keep(_server.pid)
        _reply(_server)
    return _server


def _reply(server: subprocess.Popen[str]) -> float | None:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(f"the process that judges what models wrote {describe_exit(server.wait())}; what it said is in the worker's log")
    return json.loads(line)


def _forget() -> None:
    """In a copy of this process: the server is the original's."""
    global _server, _lock
    _server, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

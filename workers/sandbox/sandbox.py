"""The sandbox: programs that the model wrote, run where they can do no harm.

    Sandbox --pipes--> a program <--fork-- server (server.py) <--start, kill, "how it ended"-- Sandbox
       |                  ^ Landlock, seccomp, rlimits, an empty folder (confine.py)
       +-- bytes in and out, deadlines, how much it writes (sandbox/forkserver/session.py)

A program is confined by the kernel before its first line runs: it reaches no network, no process but itself, no file but the interpreter's and
those in its own folder, starts no process, and takes no more memory, time, disk and threads than its limits say. docs/sandbox.md says by
what, and which attacks are tested. What a program sends back is untrusted: never judge inside of it, never unpickle or evaluate its bytes.

    with Sandbox(config) as sandbox:
        outcome = sandbox.run("print(int(input()) * 2)", b"21")       # stdin/stdout tests
        assert outcome.status == "ok" and outcome.stdout == b"42\n"

        source = "def f(x): return 2 * x\n" + '''
    import json
    while (request := __receive__()) is not None:                     # many calls of one program
        __reply__(json.dumps(f(json.loads(request))).encode())
    '''
        outcome = sandbox.session(source, [b"1", b"2"], accept=lambda number, reply: reply == (b"2", b"4")[number])
        assert outcome.status == "ok" and outcome.replies == [b"2", b"4"]

Synchronous, and safe to call from several threads: one program runs at a time; take several sandboxes for several at once.
"""

from __future__ import annotations

import logging
import resource
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workers.config import SandboxConfig
from workers.sandbox import selfcheck
from workers.sandbox.confinement.choice import Guard, choose
from workers.sandbox.forkserver.client import ServerLost, ServerProcess
from workers.sandbox.forkserver.session import Task, exchange
from workers.sandbox.outcome import Limits, Outcome, SandboxError
from workers.sandbox.sandbox_folders import Folder

__all__ = ["Limits", "Outcome", "Sandbox", "SandboxError"]

LOG = logging.getLogger(__name__)

NUM_ATTEMPTS = 2
"""A program whose server ends is run once more, on a new one."""


class Sandbox:
    """Runs programs; see the top of this file. Starting takes about 0.2 s, a program then some milliseconds.

    The server, a small process, belongs to the thread that made the sandbox or ran a program after the last server ended: it ends with it.
    Raises `SandboxError` if this machine cannot confine programs (naming what is missing and the remedy), or if the sandbox, tried out at the
    start, lets something through.
    """

    def __init__(self, config: SandboxConfig) -> None:
        self._limits = Limits.of(config)
        self._lock = threading.Lock()
        self._closed = False
        self._server: ServerProcess | None = None
        self._guard: Guard = choose(config)
        _check_memory(self._limits)
        for sentence in self._guard.weaknesses:
            LOG.warning("the sandbox is weaker than it should be (sandbox.policy=weaken): %s", sentence)
        self._folder = Folder()
        try:
            self._try_out()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """Process id of the server, None if there is none: for those who sweep away processes that verifiers left."""
        return self._server.pid if self._server is not None else None

    def run(self, source: str, stdin: bytes = b"", limits: Limits | None = None) -> Outcome:
        """Run `source` as `__main__` in a fresh process and an empty folder, with `stdin` as its standard input.

        Never raises for what the program does. Raises `SandboxError` if it could not be run, or if the sandbox is closed.
        """
        return self._run(Task(_encoded(source), stdin), limits)

    def session(self, source: str, requests: Iterable[bytes], accept: Callable[[int, bytes], bool] | None = None,
                limits: Limits | None = None, request_s: float | None = None) -> Outcome:
        """Run `source` as `__main__` and have it answer `requests`, one after the other.

        The program finds two functions among its globals: `__receive__() -> bytes | None`, the next request, None after the last; and
        `__reply__(data: bytes)`, to be called once for each. After each reply `accept(number, reply)` is asked here, outside of the sandbox
        (number: of the request, from 0); False ends the program there: early stop. `request_s` bounds each request in seconds, the
        first with the program's own beginning, and `limits.wall_s` all of them.

        A sequence of `requests` may grow while the program runs: its length is asked for after each reply, and may be waited for.

        `Outcome.replies` holds what was answered, the refused reply included, and its status is 'ok' where all requests were answered or
        `accept` said no; the program is then killed without further ado and `exit_code` is None. A program that ends or answers out of turn
        before that is an 'error'. Should the server have to be replaced, all begins again with the first request.

        Raises as `run`.
        """
        given = requests if isinstance(requests, Sequence) else list(requests)
        return self._run(Task(_encoded(source), b"", given, accept, request_s), limits)

    def _run(self, task: Task, limits: Limits | None) -> Outcome:
        limits = limits or self._limits
        _check_memory(limits)
        with self._lock:
            causes = []
            for _ in range(NUM_ATTEMPTS):
                try:
                    return self._attempt(task, limits)
                except (ServerLost, OSError) as error:  # also where no process or no file can be had
                    LOG.warning("the sandbox's server is replaced: %s", error)
                    causes.append(str(error))
                    self._end_server()
            raise SandboxError(f"the sandbox failed {NUM_ATTEMPTS} times ({'; '.join(causes)}). "
                               "The machine may be out of memory or processes")

    def _attempt(self, task: Task, limits: Limits) -> Outcome:
        if self._closed:
            raise SandboxError("the sandbox is closed")
        if self._server is None:
            self._server = ServerProcess(self._guard, self._folder)
        folder = Path(tempfile.mkdtemp(dir=self._folder.work))
        done = False
        try:
            outcome = exchange(self._server, task, folder, limits)
            done = True
            return outcome
        finally:
            if not done:  # its program must not outlive this call, nor write into a folder that is being removed
                self._end_server()
            self._folder.empty()

    def _try_out(self) -> None:
        canary = self._folder.path / "canary"
        canary.write_text("to be read by nobody")
        outcome = self.run(selfcheck.program(canary, self._guard.settings))
        if outcome.status != "ok" or outcome.stdout != selfcheck.PASSED:
            raise SandboxError(f"the sandbox does not hold on this machine: {outcome.status}, {outcome.stdout!r:.300} {outcome.stderr!r:.500}. "
                               "Report this with the kernel's version; sandbox.backend=bubblewrap may help")

    def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.end()

    def close(self) -> None:
        """End the server with its program and remove the folder. A second call does nothing."""
        with self._lock:
            self._closed = True
            self._end_server()
            self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _encoded(source: str) -> bytes:
    """What is no valid text becomes a program that does not compile."""
    return source.encode("utf-8", "surrogatepass")


def _check_memory(limits: Limits) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY and limits.memory_mb << 20 > hard:
        raise SandboxError(f"sandbox.memory_mb={limits.memory_mb}: this process itself may take only {hard >> 20} MiB (RLIMIT_AS). "
                           "Lower sandbox.memory_mb, or raise reward.memory_mb")

"""The owner's end of the fork server: start it, tell it, hear it, end it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from workers.run.processes import describe_exit
from workers.sandbox.confinement.choice import Guard
from workers.sandbox.outcome import Limits
from workers.sandbox.sandbox_folders import Folder

SERVER_S = 60.0
"""For the server to start, to start a program, and to say that a killed one is gone."""

_ROOT = Path(__file__).resolve().parents[3]
_START = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from workers.sandbox.forkserver.server import main; main(sys.argv[1:])"
_MAX_MESSAGE_BYTES = 1 << 16


class ServerLost(Exception):
    """The server ended, or does not answer."""


class ServerProcess:
    """A server, started at once. It ends with this process or with the call of `end`. Raises `ServerLost` if it does not start."""

    def __init__(self, guard: Guard, folder: Folder) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            python = [guard.interpreter.executable, "-P", "-s", "-S", "-c", _START]
            arguments = [str(theirs.fileno()), json.dumps(dataclasses.asdict(guard.settings)), str(folder.path)]
            self._popen = subprocess.Popen([*guard.wrapper(folder.work, _ROOT), *python, *arguments], stdin=subprocess.DEVNULL,
                                           stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=_environment(), cwd="/",
                                           start_new_session=True)
            undo.pop_all()
        self._channel = ours
        try:
            self.wait(time.monotonic() + SERVER_S)
            self.receive()
        except ServerLost:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Its process id; with bubblewrap, that of bubblewrap."""
        return self._popen.pid

    def fileno(self) -> int:
        """To wait for its messages."""
        return self._channel.fileno()

    def run(self, folder: Path, limits: Limits, descriptors: list[int]) -> None:
        """Have it start a program. Raises `ServerLost`."""
        bounds = {name: getattr(limits, name) for name in ("cpu_s", "memory_mb", "file_mb", "num_files")}
        self._tell({"kind": "run", "folder": str(folder), "bounds": bounds}, descriptors)

    def kill(self) -> None:
        """Have it kill the program; it says 'ended' as ever. Raises `ServerLost`."""
        self._tell({"kind": "kill"}, [])

    def _tell(self, message: dict[str, Any], descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._channel, [json.dumps(message).encode()], descriptors)
        except ConnectionError:
            raise ServerLost(self._how()) from None

    def wait(self, deadline: float) -> None:
        """Until there is a message. Raises `ServerLost` at `deadline`, in seconds of `time.monotonic`."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ServerLost(f"no answer within {SERVER_S:g} s")

    def receive(self) -> dict[str, Any]:
        """The message that has come. Raises `ServerLost` if it is the end."""
        try:
            data = self._channel.recv(_MAX_MESSAGE_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise ServerLost(self._how())
        return json.loads(data)

    def _how(self) -> str:
        try:
            return f"it {describe_exit(self._popen.wait(SERVER_S))}"
        except subprocess.TimeoutExpired:
            return "it closed its channel"

    def end(self) -> None:
        """Kill it, and its program with it (PR_SET_PDEATHSIG), and reap it."""
        self._popen.kill()
        self._popen.wait()
        self._channel.close()


def _environment() -> dict[str, str]:
    """Nothing of ours but where the interpreter's own libraries are; programs do not see that either.

    One arena of malloc's: each would take 64 MiB of the address space that a program may have. Hashes, and so the order of sets, repeat.
    """
    return {"LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1",
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}}

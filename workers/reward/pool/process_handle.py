"""The pool's end of one reward process (worker_process.py): start it, ask it, kill it, reap it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

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
from workers.run import process_tree
from workers.run.processes import describe_exit, one_thread

LOAD_TIMEOUT_S = 180.0
"""For a process to start and import a function; `reward.timeout_s` runs from there on."""

REAP_TIMEOUT_S = 10.0
"""For a killed process to be gone."""

MEMORY = "Correct it, or raise reward.memory_mb where it needs more memory than that"
_ROOT = Path(__file__).resolve().parents[3]
_READ_BYTES = 1 << 16


class NoAnswerError(Exception):
    """One attempt gave no score, or no output; its text is the cause. `remedy`: what helps against it; `late`: there was none in time."""

    def __init__(self, cause: str, remedy: str = "", late: bool = False) -> None:
        super().__init__(cause)
        self.remedy, self.late = remedy or "Correct it", late


class RewardProcess:
    """One process, started at once by the constructor. Any error in a request, cancellation included, leaves it to be killed.

    It dies with the thread that started it, so start it from a thread that lives as long as the worker.
    Raises `OSError` if it cannot be started.
    """

    def __init__(self, settings: Settings) -> None:
        self._timeout_s = settings.reward.timeout_s
        self._buffer = bytearray()
        self._killed = False
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            ours.setblocking(False)
            told = msgspec.json.encode(settings).decode()
            command = [sys.executable, "-m", "workers.reward.pool.worker_process", theirs.fileno(), os.getpid(), told]
            self._popen = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()],
                start_new_session=True, env=_environment())
            undo.pop_all()
        self._socket = ours

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._popen.pid

    def is_usable(self) -> bool:
        """Whether an idle process still listens: neither ended nor out of step."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False  # closed by its end, or bytes that nobody asked for

    async def score(self, request: Score) -> float:
        """The score in [0, 1]. Raises `NoAnswerError` with the cause if there is none in time."""
        reply = await self._answer(request)
        if not isinstance(reply, Scored):
            raise NoAnswerError(f"the process answered {type(reply).__name__} instead of a score")
        return reply.score

    async def execute(self, request: Execute) -> str:
        """What the program printed. Raises `NoAnswerError` with the cause if nothing is known of that in time."""
        reply = await self._answer(request)
        if not isinstance(reply, Executed):
            raise NoAnswerError(f"the process answered {type(reply).__name__} instead of a program's output")
        return reply.text

    async def load(self, request: Load) -> None:
        """Have the function imported. Raises `NoAnswerError` with the cause if it cannot be."""
        await self._answer(request)

    async def _answer(self, request: Request) -> Reply:
        try:
            reply = await self._exchange(request)
        except (ConnectionError, EOFError):
            self.kill()
            raise NoAnswerError(f"the process ended: {describe_exit(await self.reap())}", MEMORY) from None
        if isinstance(reply, Failed):
            raise NoAnswerError(reply.cause, MEMORY if reply.cause.startswith("MemoryError") else "")
        return reply

    async def _exchange(self, request: Request) -> Reply:
        loop = asyncio.get_running_loop()
        limit, remedy = f"no answer within {LOAD_TIMEOUT_S:g} s of starting and importing it", ""
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await loop.sock_sendall(self._socket, frame(request))
                reply = await self._receive()
            if isinstance(reply, Loaded) and not isinstance(request, Load):
                limit, remedy = f"no answer within reward.timeout_s={self._timeout_s:g}", "Correct it, or raise reward.timeout_s"
                async with asyncio.timeout(self._timeout_s):
                    reply = await self._receive()
        except TimeoutError:
            raise NoAnswerError(limit, remedy, late=True) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise NoAnswerError(f"the exchange with the process failed: {error}") from error
        return reply

    async def _receive(self) -> Reply:
        head = await self._exactly(LENGTH_BYTES)
        return msgspec.msgpack.decode(await self._exactly(frame_length(head)), type=Reply)

    async def _exactly(self, num_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._buffer) < num_bytes:
            piece = await loop.sock_recv(self._socket, _READ_BYTES)
            if not piece:
                raise EOFError
            self._buffer += piece
        data = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return data

    def kill(self) -> None:
        """Kill it with everything that it started. Returns at once; `reap` waits for it."""
        if not self._killed:  # once reaped, its number may belong to someone else
            self._killed = True
            process_tree.kill(self._popen.pid)

    async def reap(self) -> int:
        """Wait for the killed process; returns its exit code, negative for a signal.

        Raises `subprocess.TimeoutExpired` if the kernel does not let go of it within `REAP_TIMEOUT_S`.
        """
        return await asyncio.to_thread(self._popen.wait, REAP_TIMEOUT_S)

    async def dispose(self) -> None:
        """Kill it, close the socket and reap it. Nobody may wait for an answer any more."""
        self.kill()
        self._socket.close()
        await self.reap()


def _environment() -> dict[str, str]:
    """This process's environment, with the checkout importable and numerical libraries on one thread."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **one_thread(), "PYTHONPATH": os.pathsep.join(paths)}


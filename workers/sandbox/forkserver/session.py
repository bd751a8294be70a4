"""The owner's side of one program: its pipes, its deadlines and how much it may write.

    stdin -----------------> program --> stdout, stderr  (together within `output_bytes`)
    requests, one by one --> program --> replies         (each asked for, within `request_s`)
    the server says: started -> the clock runs ... ended -> what is still in the pipes is read, and that is all

Every wait ends: the program at its deadline (killed), the server's answers after `SERVER_S` (`ServerLost`).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from workers.sandbox.forkserver.client import SERVER_S, ServerProcess
from workers.sandbox.forkserver.protocol import Dialogue, OutOfTurn
from workers.sandbox.outcome import Limits, Outcome, SandboxError, Status, judge

READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Task:
    """What is to be run. `requests`: None outside of sessions; `request_s`: for each, None for no limit of its own."""

    source: bytes
    stdin: bytes
    requests: Sequence[bytes] | None = None
    accept: Callable[[int, bytes], bool] | None = None
    request_s: float | None = None


def exchange(server: ServerProcess, task: Task, folder: Path, limits: Limits) -> Outcome:
    """Have `server` run `task` in `folder`, and stay with it to its end. Raises `ServerLost`, `SandboxError`."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(FileIO(os.memfd_create("source"), "r+"))
        written = 0
        while written < len(task.source):
            written += source.write(task.source[written:]) or 0
        source.seek(0)
        pipes = [_pipe(stack, inwards=inwards) for inwards in (True, False, False, *((True, False) if task.requests is not None else ()))]
        server.run(folder, limits, [source.fileno(), *(theirs.fileno() for _, theirs in pipes)])
        for _, theirs in pipes:
            theirs.close()
        return _Conversation(server, task, limits, [ours for ours, _ in pipes]).hold()


def _pipe(stack: contextlib.ExitStack, *, inwards: bool) -> tuple[FileIO, FileIO]:
    """Our end, which never blocks, and the program's."""
    read_end, write_end = (stack.enter_context(FileIO(number, mode)) for number, mode in zip(os.pipe(), "rw", strict=True))
    ours, theirs = (write_end, read_end) if inwards else (read_end, write_end)
    os.set_blocking(ours.fileno(), False)
    return ours, theirs


class _Conversation:
    """What goes back and forth with one program."""

    def __init__(self, server: ServerProcess, task: Task, limits: Limits, ends: list[FileIO]) -> None:
        self._server, self._limits, self._request_s = server, limits, task.request_s
        self._dialogue = Dialogue(task.requests, task.accept) if task.requests is not None else None
        self._unsent = {ends[0]: memoryview(task.stdin)}
        self._output = {ends[1]: bytearray(), ends[2]: bytearray()}
        self._stdin = ends[0]
        self._requests, self._replies = (ends[3], ends[4]) if self._dialogue is not None else (ends[0], ends[1])  # used in sessions alone
        self._num_bytes = 0
        self._verdict: Status | None = None
        self._started: float | None = None
        self._ended: float | None = None
        self._request_started = 0.0
        self._status, self._cpu_s = 0, 0.0
        self._selector = selectors.DefaultSelector()

    def hold(self) -> Outcome:
        """To the end of the program."""
        with self._selector as selector:
            self._wait_for_server(lambda: self._started is not None)
            selector.register(self._server, selectors.EVENT_READ, self._hear)
            self._begin()
            while self._ended is None and self._verdict is None:
                for key, _ in selector.select(max(0.0, self._deadline() - time.monotonic())):
                    if self._verdict is None:
                        key.data()
                if self._ended is None and self._verdict is None and time.monotonic() >= self._deadline():
                    self._verdict = "timeout"
            if self._ended is None:
                self._server.kill()
                self._wait_for_server(lambda: self._ended is not None)
            return self._outcome()

    def _wait_for_server(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SERVER_S
        while not there():
            self._server.wait(deadline)
            self._hear()

    def _hear(self) -> None:
        """Take one message of the server."""
        message = self._server.receive()
        if message["kind"] == "failed":
            raise SandboxError(f"the sandbox could not confine a program: {message['cause']}. Nothing was run; docs/sandbox.md says what it needs")
        if message["kind"] == "started":
            self._started = self._request_started = time.monotonic()
        if message["kind"] == "ended":
            self._ended = time.monotonic()
            self._status, self._cpu_s = message["status"], message["cpu_s"]

    def _begin(self) -> None:
        self._selector.register(self._stdin, selectors.EVENT_WRITE, self._feed)
        for end in self._output:
            self._selector.register(end, selectors.EVENT_READ, lambda end=end: self._read(end))
        if self._dialogue is not None:
            self._selector.register(self._replies, selectors.EVENT_READ, self._read_reply)
            self._ask()

    def _deadline(self) -> float:
        assert self._started is not None
        end = self._started + self._limits.wall_s
        return end if self._request_s is None else min(end, self._request_started + self._request_s)

    def _feed(self) -> None:
        """Write standard input; it is closed behind its last byte."""
        if self._write(self._stdin):
            self._selector.unregister(self._stdin)
            self._stdin.close()

    def _write(self, end: FileIO) -> bool:
        """Write what `end` takes; whether that was all, or nobody reads it any more."""
        try:
            self._unsent[end] = self._unsent[end][end.write(self._unsent[end][:READ_BYTES]) or 0:]
        except BrokenPipeError:
            return True
        return not self._unsent[end]

    def _take(self, end: FileIO) -> bytes:
        """What has come; nothing (and no more events) at its end. Too much is a verdict, and cut off."""
        data = end.read(READ_BYTES)
        if data == b"" and end in self._selector.get_map():
            self._selector.unregister(end)
        room = self._limits.output_bytes - self._num_bytes
        self._num_bytes += len(data or b"")
        if self._num_bytes > self._limits.output_bytes:
            self._verdict = "output"
        return (data or b"")[:max(0, room)]

    def _read(self, end: FileIO) -> bool:
        """Take what has come on standard output or error; whether there was anything."""
        data = self._take(end)
        self._output[end] += data
        return bool(data)

    def _read_reply(self) -> bool:
        """Take what has come of a reply; whether there was anything. After a whole one the next request goes out."""
        assert self._dialogue is not None
        data = self._take(self._replies)
        try:
            if self._verdict is None and self._dialogue.received(data):
                self._ask()
        except OutOfTurn:
            self._verdict = "error"
        return bool(data)

    def _ask(self) -> None:
        """The next request, or the end of the session."""
        assert self._dialogue is not None
        if self._dialogue.is_over:
            self._verdict = "ok"
        elif self._ended is None:
            self._request_started = time.monotonic()
            self._unsent[self._requests] = memoryview(self._dialogue.next_request())
            if self._requests not in self._selector.get_map():
                self._selector.register(self._requests, selectors.EVENT_WRITE, self._send)

    def _send(self) -> None:
        if self._write(self._requests):
            self._selector.unregister(self._requests)

    def _outcome(self) -> Outcome:
        assert self._started is not None and self._ended is not None
        by_itself = self._verdict is None
        while self._dialogue is not None and self._verdict is None and self._read_reply():
            pass
        for end in self._output:  # the program is gone: all that it wrote is here
            while self._num_bytes <= self._limits.output_bytes and self._read(end):
                pass
        stdout, stderr = (bytes(data) for data in self._output.values())
        status = self._verdict or judge(self._status, self._cpu_s, self._limits, stderr)
        if self._dialogue is not None and status == "ok" and not self._dialogue.is_over:
            status = "error"  # it left before its end
        return Outcome(status, self._status if by_itself and self._status >= 0 else None, stdout, stderr, self._ended - self._started,
                       self._dialogue.replies if self._dialogue is not None else [])

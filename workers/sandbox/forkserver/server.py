"""The fork server: a small process, with a few modules imported, that forks one confined process for each program and says how it ended.

    owner --Run + descriptors--> [fork] -> child: confine, "ready" --------> the program
          <----- started ------ [  poll ] <- "may I?" (threads, new files) ---+
          ------- kill -------> [       ]
          <------ ended ------- [ reaped]

It waits for the owner (for ever, that is its purpose; it ends when the owner closes the channel or is gone), for a child to be confined, and for
that child to end (the owner, who has the deadline, says kill). One program at a time. Imports the standard library alone, for it also runs in other
interpreters than the owner's.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

from workers.sandbox import sandbox_folders
from workers.sandbox.confinement import counting, libc
from workers.sandbox.confinement.confine import Bounds, Settings, confine, take_descriptors
from workers.sandbox.confinement.syscalls import ARCHITECTURES
from workers.sandbox.forkserver import program

PRELOADED = ("bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq", "io", "itertools", "json",
             "math", "operator", "random", "re", "statistics", "string", "threading", "typing")
MAX_MESSAGE_BYTES = 1 << 16
MAX_DESCRIPTORS = 6
ALIVE_CHECK_MS = 1000

Descriptors = list[int]


class OwnerGone(Exception):
    """Nobody is left to serve."""


class Server:
    """Serves the owner at `channel` until it is gone."""

    def __init__(self, channel: socket.socket, settings: Settings) -> None:
        self._channel = channel
        self._settings = settings
        self._owner = os.getppid()
        self._wakeup, write_end = os.pipe()
        for end in (self._wakeup, write_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # poll wakes up

    def serve(self) -> None:
        """Run one program after the other. Raises `OwnerGone`."""
        self._say(kind="ready")
        while True:
            self._wait([self._channel.fileno()])
            message, descriptors = self._receive()
            if message["kind"] == "run":
                self._run(message, descriptors)

    def _run(self, message: dict[str, Any], descriptors: Descriptors) -> None:
        bounds = Bounds(**message["bounds"])
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            pid = os.fork()
            if pid == 0:
                _child(self._settings, bounds, message["folder"], descriptors, theirs)
            theirs.close()
            for number in descriptors:
                os.close(number)
            answer, listeners, _, _ = socket.recv_fds(ours, MAX_MESSAGE_BYTES, 1)  # ends with the child at the latest
            if listeners:
                answer = ours.recv(MAX_MESSAGE_BYTES)
        if answer != b"ready":
            for number in listeners:
                os.close(number)
            os.waitpid(pid, 0)
            self._say(kind="failed", cause=answer.decode(errors="replace") or "the process ended before it was confined")
            return
        self._say(kind="started")
        status, cpu_s = self._watch(pid, listeners, bounds)
        self._say(kind="ended", status=status, cpu_s=cpu_s)

    def _watch(self, pid: int, listeners: Descriptors, bounds: Bounds) -> tuple[int, float]:
        """Wait for the program; its exit status (negative: signal) and seconds of computing."""
        allowance = counting.Allowance(ARCHITECTURES[os.uname().machine], bounds.num_files)
        try:
            while True:
                found, status, usage = os.wait4(pid, os.WNOHANG)
                if found:
                    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
                ready = self._wait([self._channel.fileno(), self._wakeup, *listeners])
                if self._channel.fileno() in ready and self._receive()[0]["kind"] == "kill":
                    os.kill(pid, signal.SIGKILL)  # not waited for yet: the number is still its own
                if self._wakeup in ready:
                    os.read(self._wakeup, 4096)
                listeners = self._answer(listeners, ready, allowance)
        except OwnerGone:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            for listener in listeners:
                os.close(listener)

    def _answer(self, listeners: Descriptors, ready: dict[int, int], allowance: counting.Allowance) -> Descriptors:
        """Answer what waits; returns those listeners that somebody may still use."""
        for listener in listeners:
            if ready.get(listener, 0) & select.POLLIN:
                counting.answer(listener, allowance)
            elif ready.get(listener, 0):  # no process has this filter any more
                os.close(listener)
                return []
        return listeners

    def _wait(self, descriptors: Descriptors) -> dict[int, int]:
        """The events of those that have something; raises `OwnerGone`."""
        poll = select.poll()
        for number in descriptors:
            poll.register(number, select.POLLIN)
        while True:
            if ready := dict(poll.poll(ALIVE_CHECK_MS)):
                return ready
            if os.getppid() != self._owner:
                raise OwnerGone

    def _receive(self) -> tuple[dict[str, Any], Descriptors]:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, MAX_DESCRIPTORS)
        except ConnectionError:
            raise OwnerGone from None
        if not data:
            raise OwnerGone
        return json.loads(data), descriptors

    def _say(self, **message: Any) -> None:
        try:
            self._channel.send(json.dumps(message).encode())
        except ConnectionError:
            raise OwnerGone from None


def _child(settings: Settings, bounds: Bounds, folder: str, descriptors: Descriptors, report: socket.socket) -> None:
    """The process of one program. Never returns."""
    code = 1
    try:
        with open(descriptors[0], "rb") as file:  # a copy in memory: nothing of it stays open
            source = file.read()
        report = take_descriptors(descriptors[1:], report)
        try:
            confine(settings, bounds, folder, report)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the program must not run; the owner is told
            report.sendall(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        report.sendall(b"ready")
        report.close()
        program.prepare(folder, settings.packages)
        code = program.run(source, session=len(descriptors) > 4)
    finally:
        os._exit(code)


def main(arguments: list[str]) -> None:
    """`FD SETTINGS FOLDER`: serve the channel at FD; at the end FOLDER is removed, unless the owner does so."""
    channel = socket.socket(fileno=int(arguments[0]))
    channel.set_inheritable(False)
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
    libc.prctl(libc.PR_SET_CHILD_SUBREAPER, 1)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    try:
        Server(channel, Settings(**json.loads(arguments[1]))).serve()
    except OwnerGone:
        sandbox_folders.remove(arguments[2])
        sys.exit(0)

"""What every sandbox tries out before it runs anything: a program that attempts what must fail, and does what must work."""

from __future__ import annotations

from pathlib import Path

from workers.sandbox.confinement.confine import Settings

PASSED = b"confined\n"

_PROGRAM = '''
import os, socket, threading

def refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except OSError:
        return True
    return False

leaks = [] if not {guarded} or refused(open, {canary!r}) else ["reads files of others"]
leaks += [] if refused(open, {canary!r}, "r+") and refused(open, {canary!r} + "2", "w") else ["writes files of others"]
leaks += [] if refused(socket.socket) else ["opens sockets"]
leaks += [] if refused(os.fork) else ["starts processes"]
leaks += [] if refused(os.kill, os.getppid(), 0) else ["signals other processes"]
import colorsys
if {guarded} and {counted}:
    with open("file", "w") as file:
        file.write("mine")
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
print(*(leaks or ["confined"]), sep=", ")
'''


def program(canary: Path, settings: Settings) -> str:
    """The program; it prints `PASSED`, or what it could do. `canary`: a file outside of its folder."""
    return _PROGRAM.format(canary=str(canary), guarded=settings.writes, counted=settings.counted)

"""How the process of a program gives up, step by step, what it does not need. The order matters: each step must still be able to do its own."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from dataclasses import dataclass

from workers.sandbox.confinement import landlock, libc, seccomp, syscall_policy
from workers.sandbox.confinement.syscalls import ARCHITECTURES

MIB = 1 << 20
NUM_DESCRIPTORS = 64
STACK_BYTES = 64 * MIB
FIRST_FREE = 5
"""Descriptors of a program: standard input, output, error; in a session requests and replies."""


@dataclass(frozen=True)
class Settings:
    """What the server is started with. `readable`: files and folders that programs may read; `packages`: folders that they import from, after the
    standard library; `landlock`: the ABI, 0: none; `writes`, `counted`: see `syscall_policy.policy`."""

    readable: list[str]
    packages: list[str]
    landlock: int
    writes: bool
    counted: bool


@dataclass(frozen=True)
class Bounds:
    """What one program may take: seconds of computing, MiB of address space and of a file, number of files made."""

    cpu_s: float
    memory_mb: int
    file_mb: int
    num_files: int


def confine(settings: Settings, bounds: Bounds, folder: str, report: socket.socket) -> None:
    """Confine this process, freshly forked by the server, for good. Raises `OSError` if any step fails: then nothing may be run in it.

    `report` is sent the descriptor by which the server counts threads and files, if it does. `take_descriptors` comes first.
    """
    _part_from_the_server()
    os.chdir(folder)
    _go_first()
    _set_limits(bounds)
    architecture = ARCHITECTURES[os.uname().machine]
    call = architecture.numbers
    libc.prctl(libc.PR_SET_DUMPABLE, 0)
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    if settings.landlock:
        landlock.restrict(settings.landlock, settings.readable, [folder] if settings.writes else [])
    libc.drop_capabilities(call["capset"])
    if settings.counted:
        listener = seccomp.install(call["seccomp"], syscall_policy.counting(architecture), seccomp.NEW_LISTENER)
        socket.send_fds(report, [b"listener"], [listener])
        os.close(listener)
    seccomp.install(call["seccomp"], syscall_policy.policy(architecture, os.getpid(), counted=settings.counted, writes=settings.writes))


def _part_from_the_server() -> None:
    """Its own session; signals as at the start of any process; killed with the server."""
    server = os.getppid()
    os.setsid()
    libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        raise OSError("the server is gone")
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # numbers that the C library keeps for itself
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as Python has it
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def take_descriptors(descriptors: list[int], report: socket.socket) -> socket.socket:
    """Close everything but `descriptors`, which move to 0, 1, ..., and `report`, which is returned at its new place. The child's first step."""
    high = [os.dup(number) for number in (*descriptors, report.fileno())]  # os.dup gives the lowest free: never one of 0, 1, 2
    while min(high) < FIRST_FREE + 1:
        high = [os.dup(number) for number in high]
    for place, number in enumerate(high[:-1]):
        os.dup2(number, place)
    report.detach()
    os.dup2(high[-1], FIRST_FREE)
    os.closerange(FIRST_FREE + 1, _most_descriptors())
    os.closerange(len(descriptors), FIRST_FREE)
    os.set_inheritable(FIRST_FREE, False)
    return socket.socket(fileno=FIRST_FREE)


def _go_first() -> None:
    """Where memory runs out, the program is to be killed, not one of those that work for it."""
    libc.prctl(libc.PR_SET_DUMPABLE, 1)  # else the file belongs to root
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # no /proc in bubblewrap
        file.write("1000")


def _most_descriptors() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _set_limits(bounds: Bounds) -> None:
    cpu_s = max(1, int(-(-bounds.cpu_s // 1)))
    _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    for what, value in ((resource.RLIMIT_AS, bounds.memory_mb * MIB), (resource.RLIMIT_FSIZE, bounds.file_mb * MIB),
                        (resource.RLIMIT_NOFILE, NUM_DESCRIPTORS), (resource.RLIMIT_STACK, STACK_BYTES), (resource.RLIMIT_CORE, 0),
                        (resource.RLIMIT_MEMLOCK, 0), (resource.RLIMIT_MSGQUEUE, 0)):
        _limit(what, value, value)


def _limit(what: int, soft: int, hard: int) -> None:
    most = resource.getrlimit(what)[1]
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(what, (soft, hard))

"""Which system calls a program may make: a list of what is allowed; everything else is refused, whatever kernels to come may offer.

What programs need and what could be abused is decided by the arguments: see `_conditions`. Threads, and opens that may make a file, are counted
by the server (counting.py): no limit of the kernel's bounds them for one process, root's included.
"""

from __future__ import annotations

import errno
import json
import os

from workers.sandbox.confinement import seccomp
from workers.sandbox.confinement.seccomp import ALLOW, ERROR, NOTIFY, Block, answer, any_bit, is_null, one_of
from workers.sandbox.confinement.syscalls import Architecture

# ruff: noqa: SIM905 - names are easier to read without quotes
ALLOWED = """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close close_range dup dup2 dup3 pipe pipe2 poll ppoll select
    pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime
    timerfd_gettime signalfd4 stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents getdents64 getcwd chdir
    fchdir readlink readlinkat unlink unlinkat rmdir rename renameat fsync fdatasync ftruncate fadvise64 sendfile
    copy_file_range umask brk munmap mremap mprotect madvise mincore msync rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending
    rt_sigtimedwait rt_sigsuspend sigaltstack restart_syscall pause alarm setitimer getitimer futex futex_waitv set_robust_list set_tid_address
    rseq membarrier sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu getpid
    getppid gettid getuid geteuid getgid getegid getgroups getresuid getresgid getpgrp getpgid getsid getpriority capget uname sysinfo getrusage
    times getrlimit gettimeofday time clock_gettime clock_getres clock_nanosleep nanosleep getrandom exit exit_group wait4 waitid recvfrom
    shutdown getsockname getpeername getsockopt
""".split()
"""Harmless, whatever their arguments. Not here, though harmless to look at: chmod, chown, utimensat, truncate by path (Landlock does not see the
first three, and the last only from ABI 3 on), memfd_create and shared anonymous memory (more than the address space counts), flock, inotify
(limits per user), everything that names another process."""

CHANGING = ("unlink", "unlinkat", "rmdir", "rename", "renameat")
"""Refused where nothing keeps a program from the files of others."""

REFUSED = ERROR | errno.EPERM
UNKNOWN = ERROR | errno.ENOSYS
"""Of calls whose arguments a filter cannot see, and of those newer than this policy: the C library falls back to older ones."""
FIRST_UNKNOWN = 451

CLONE_THREAD = 0x00010000
CLONE_NAMESPACES = 0x7E020000  # CLONE_NEWTIME lies among the bits of the exit signal, and means something to clone3 alone
CLONE_PTRACE = 0x00002000
TMPFILE = 0o20000000  # of O_TMPFILE, the bit without O_DIRECTORY
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
AF_UNIX, SOCK_STREAM, SOCK_FLAGS = 1, 1, (0, os.O_NONBLOCK, os.O_CLOEXEC, os.O_NONBLOCK | os.O_CLOEXEC)
FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
"""F_DUPFD, F_[GS]ETF[DL], record locks, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not F_SETOWN, F_SETSIG: they have the kernel send signals to others."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. Not FS_IOC_*, which change files that are open for reading, nor TIOCSTI."""
RENAME = (0, 1, 2)
"""None, RENAME_NOREPLACE, RENAME_EXCHANGE. Not RENAME_WHITEOUT: it makes a file that nobody counts. Likewise fallocate only without flags: its
others take blocks beyond the end of a file, which RLIMIT_FSIZE does not see."""
PRCTL = (15, 16, 0x53564D41)
"""PR_SET_NAME, PR_GET_NAME, PR_SET_VMA. Not PR_SET_PDEATHSIG, PR_SET_DUMPABLE."""

COUNTED_THREADS = ("clone",)
COUNTED_FILES = ("open", "openat", "mkdir", "mkdirat")


def policy(architecture: Architecture, pid: int, *, counted: bool, writes: bool) -> Block:
    """The filter for the program with process id `pid`.

    `counted`: a supervisor counts threads and new files (else there can be none); `writes`: something else keeps it to its own folder (else it
    can write nothing).
    """
    conditions = _conditions(pid, counted=counted, writes=writes)
    plain = [name for name in ALLOWED if writes or name not in CHANGING]
    numbers = architecture.numbers
    decisions = [(name, answer(ALLOW)) for name in plain] + list(conditions.items())
    return seccomp.assemble(architecture.audit, [(numbers[name], block) for name, block in decisions if name in numbers],
                            newest=(FIRST_UNKNOWN, UNKNOWN), other=REFUSED)


HIDDEN_MEMORY = ("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "io_uring_setup", "add_key", "request_key", "keyctl")
KERNEL = ("bpf", "perf_event_open", "userfaultfd")
"""Ways into the kernel that no program of a repository needs."""


def without_hidden_memory(architecture: Architecture) -> Block:
    """The filter for a container, which keeps processes from files by other means: refuses memory that counts for no process and no file system."""
    refused = [(architecture.numbers[name], answer(UNKNOWN)) for name in (*HIDDEN_MEMORY, *KERNEL)]
    return seccomp.assemble(architecture.audit, refused, newest=(FIRST_UNKNOWN, UNKNOWN), other=ALLOW)


def profile_without_hidden_memory(machine: str) -> str:
    """The same for Apptainer, in the form of the OCI's runtime specification (its section on seccomp); newer calls than these it lets through."""
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "architectures": [f"SCMP_ARCH_{machine.upper()}"],
                       "syscalls": [{"names": [*HIDDEN_MEMORY, *KERNEL], "action": "SCMP_ACT_ERRNO"}]})


def _conditions(pid: int, *, counted: bool, writes: bool) -> dict[str, Block]:
    created = ALLOW if counted and writes else REFUSED
    written = ALLOW if writes else REFUSED
    return {
        "open": _opening(1, created, written),
        "openat": _opening(2, created, written),
        "mkdir": answer(created),
        "mkdirat": answer(created),
        "renameat2": one_of(4, RENAME, written, REFUSED),
        "fallocate": one_of(1, [0], written, REFUSED),
        "clone": any_bit(0, CLONE_NAMESPACES | CLONE_PTRACE, answer(REFUSED),
                         any_bit(0, CLONE_THREAD, answer(ALLOW if counted else REFUSED), answer(REFUSED))),
        "clone3": answer(UNKNOWN),
        "openat2": answer(UNKNOWN),
        "mmap": any_bit(3, MAP_SHARED, any_bit(3, MAP_ANONYMOUS, answer(REFUSED), answer(ALLOW)), answer(ALLOW)),
        "kill": one_of(0, [pid], ALLOW, REFUSED),
        "tgkill": one_of(0, [pid], ALLOW, REFUSED),
        "prlimit64": one_of(0, [0, pid], ALLOW, REFUSED),
        "prctl": one_of(0, PRCTL, ALLOW, REFUSED),
        "ioctl": one_of(1, IOCTL, ALLOW, REFUSED),
        "fcntl": one_of(1, FCNTL, ALLOW, REFUSED),
        "socketpair": _local_pair(),
        "sendto": is_null(4, ALLOW, REFUSED),  # without an address: along a pair
    }


def _opening(flags: int, created: int, written: int) -> Block:
    """The decision on open, by its argument number `flags`. Truncating by opening for reading would escape Landlock before ABI 3."""
    reading = any_bit(flags, os.O_TRUNC, answer(REFUSED), answer(ALLOW))
    return any_bit(flags, os.O_CREAT | TMPFILE, answer(created), any_bit(flags, os.O_ACCMODE, answer(written), reading))


def _local_pair() -> Block:
    """A pair of connected local streams, as event loops want it: it reaches nothing but itself."""
    other, kinds = answer(REFUSED), one_of(1, [SOCK_STREAM | flags for flags in SOCK_FLAGS], ALLOW, REFUSED)
    # A family other than AF_UNIX has other bits, or none.
    return any_bit(0, 0xFFFFFFFF & ~AF_UNIX, other, any_bit(0, AF_UNIX, kinds, other))


def counting(architecture: Architecture) -> Block:
    """The filter that has the supervisor asked about threads and about opens that may make a file; all else is `policy`'s."""
    numbers = architecture.numbers
    creating = {"open": any_bit(1, os.O_CREAT | TMPFILE, answer(NOTIFY), answer(ALLOW)),
                "openat": any_bit(2, os.O_CREAT | TMPFILE, answer(NOTIFY), answer(ALLOW))}
    decisions = [(name, creating.get(name, answer(NOTIFY))) for name in (*COUNTED_THREADS, *COUNTED_FILES)]
    return seccomp.assemble(architecture.audit, [(numbers[name], block) for name, block in decisions if name in numbers],
                            newest=(FIRST_UNKNOWN, UNKNOWN), other=ALLOW)

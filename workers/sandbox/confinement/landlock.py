"""Landlock: the kernel's own confinement to files, by ctypes (Linux 5.13; https://docs.kernel.org/userspace-api/landlock.html).

A process gives itself a set of rules and cannot get rid of it, nor can what it starts. It needs no privilege. What is refused: opening, making,
removing and renaming files outside of the rules; TCP (ABI 4); signals and abstract sockets to processes outside (ABI 6); and, with any ABI, tracing
processes outside, which covers their /proc/PID/mem, environ, fd and the like. Not covered: looking at names, sizes and times of files (stat), and
changing modes and owners; the latter is refused by seccomp (syscall_policy.py).
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable

from workers.sandbox.confinement.libc import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same on all architectures
LOG_SAME_EXEC_OFF = 1  # programs could flood the audit log with what they are denied
VERSION_FLAG = 1
PATH_BENEATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_DIR, MAKE_REG = 1 << 7, 1 << 8
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15

READ = READ_FILE | READ_DIR
READ_WRITE = READ | WRITE_FILE | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER | TRUNCATE
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV
"""Rights that a rule for something other than a folder may hold."""


def abi() -> int:
    """The version of Landlock that this kernel offers to this process; 0: none."""
    try:
        return syscall(CREATE_RULESET, 0, 0, VERSION_FLAG)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):  # not compiled in; switched off; refused by a container's filter
            return 0
        raise


def handled(version: int) -> tuple[int, int, int]:
    """What a rule set of ABI `version` restricts: rights on files, on the network, and scopes."""
    files = (1 << 13) - 1
    for least, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV)):
        if version >= least:
            files |= right
    return files, 3 if version >= 4 else 0, 3 if version >= 6 else 0


def restrict(version: int, readable: Iterable[str], writable: Iterable[str]) -> None:
    """Confine this thread, and what it starts, to reading below `readable` and to reading and writing below `writable`.

    Paths that do not exist are left out. no_new_privs must be set. Raises `OSError`.
    """
    files, network, scopes = handled(version)
    attributes = struct.pack("=QQQ", files, network, scopes)[:24 if version >= 6 else 16 if version >= 4 else 8]
    rules = syscall(CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for path in readable:
            _allow(rules, path, READ & files)
        for path in writable:
            _allow(rules, path, READ_WRITE & files)
        syscall(RESTRICT_SELF, rules, LOG_SAME_EXEC_OFF if version >= 7 else 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not os.path.isdir(path):
            rights &= OF_FILES
        syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, place), 0)
    finally:
        os.close(place)

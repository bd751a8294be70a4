"""System calls that Python has no name for. Linux on x86_64 and aarch64; the standard library alone."""

from __future__ import annotations

import ctypes
import os
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4

_CAPABILITY_VERSION_3 = 0x20080522


def syscall(number: int, *arguments: Any) -> int:
    """System call `number`; integers are passed as 64 bits, bytes and ctypes buffers as pointers. Raises `OSError`."""
    values = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    LIBC.syscall.restype = ctypes.c_long
    result = LIBC.syscall(ctypes.c_long(number), *values)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)} (system call {number})")
    return int(result)


def prctl(option: int, value: int, third: int = 0) -> None:
    """prctl(2). Raises `OSError`."""
    if LIBC.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{os.strerror(error)} (prctl {option})")


def drop_capabilities(capset: int) -> None:
    """Give up every capability of this process, for good once no_new_privs is set; `capset` is that call's number. Raises `OSError`."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    syscall(capset, ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))

"""What a program may have a bounded number of: threads, and opens that may make a file. Each is asked of the server by seccomp's notifications.

The answer depends on the number of the call alone and is final: its flags are in registers, which nobody can change in between. What is
counted never comes back, so that deleting files, or ending threads, makes no room: deleted files live on while they are mapped.
"""

from __future__ import annotations

import errno
import fcntl
import struct

from workers.sandbox.confinement.syscall_policy import COUNTED_THREADS
from workers.sandbox.confinement.syscalls import Architecture

MAX_THREADS = 128

_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # SECCOMP_IOCTL_NOTIF_RECV, _SEND, with the sizes of the two structures in them
NOTIFICATION_SIZES = (80, 24, 64)
_CONTINUE = 1


class Allowance:
    """How many more threads and files a program may make."""

    def __init__(self, architecture: Architecture, num_files: int) -> None:
        self._threads = [architecture.numbers[name] for name in COUNTED_THREADS]
        self._left = {"threads": MAX_THREADS, "files": num_files}

    def ask(self, number: int) -> int:
        """Take one for system call `number`: 0, or the error number that the program is given."""
        kind, refusal = ("threads", errno.EAGAIN) if number in self._threads else ("files", errno.EDQUOT)
        if self._left[kind] == 0:
            return refusal
        self._left[kind] -= 1
        return 0


def answer(listener: int, allowance: Allowance) -> None:
    """Answer one notification that waits at `listener`; nothing if who asked has ended meanwhile. Raises `OSError`."""
    notification = bytearray(NOTIFICATION_SIZES[0])
    try:
        fcntl.ioctl(listener, _RECEIVE, notification)
        identity, _, _, number = struct.unpack_from("=QIIi", notification)
        refusal = allowance.ask(number)
        response = struct.pack("=QqiI", identity, 0, -refusal, 0 if refusal else _CONTINUE)
        fcntl.ioctl(listener, _SEND, response)
    except FileNotFoundError:
        return

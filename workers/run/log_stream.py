"""Standard output that lies in the run folder: what finds no room there is lost, and is no reason to end."""

from __future__ import annotations

import io
import os
import sys


class LogStream(io.RawIOBase):
    """Writes to a file descriptor; what that does not take is counted, and said once it takes something again."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._lost = descriptor, 0

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def write(self, content: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        """Take all of `content`, whatever becomes of it."""
        given = bytes(content)
        try:
            if self._lost:
                os.write(self._descriptor, f"[{self._lost} bytes of this log found no room]\n".encode())
                self._lost = 0
            written = os.write(self._descriptor, given)
        except OSError:
            written = 0
        self._lost += len(given) - written
        return len(given)


def keep_logging() -> None:
    """Have this process's standard output and error be such streams."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, name).flush()
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(LogStream(descriptor)), errors="backslashreplace", line_buffering=True))

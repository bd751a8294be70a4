"""Locks that end with their holder (flock), on files that may be removed while others wait for them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


class Lock:
    """A lock that this process holds. Children that it forks would hold it too; those that it executes do not."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @staticmethod
    def take(path: Path, shared: bool = False) -> Lock | None:
        """The lock, or None while others hold it. Makes the file where it is not there; raises OSError where that fails."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return Lock(path, descriptor)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the file was removed, or made anew, in between: what was locked is nothing

    def write(self, content: bytes) -> None:
        """Give the file this content."""
        os.pwrite(self._descriptor, content, 0)

    def alone(self) -> bool:
        """Make a shared lock exclusive; where others hold it, it is lost. False if it was given up."""
        if self._descriptor < 0:
            return False
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def release(self) -> None:
        """Give it up, also where a child that was forked has it. Harmless to repeat."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Remove the file, and give up the exclusive lock on it."""
        self._path.unlink(missing_ok=True)
        self.release()

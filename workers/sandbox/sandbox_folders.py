"""The folder of one sandbox, and what is left of those whose owners were killed together with their servers.

An owner holds a lock on its folder as long as it lives: a folder of this user and machine that nobody has locked is removed by the next sandbox
that starts. A folder gets its name once it is locked, so that none is taken away while it is being made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

WORK = "work"
"""The folder within, in which programs have theirs: all that bubblewrap lets them write to."""


class Folder:
    """A new folder, locked, with a folder `work` in it. `close` removes it."""

    def __init__(self) -> None:
        prefix = f"headway-sandbox-{socket.gethostname()}-"
        starting = Path(tempfile.mkdtemp(prefix="headway-starting-"))
        self._lock = os.open(starting, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = starting.with_name(prefix + starting.name.removeprefix("headway-starting-"))
        starting.rename(self.path)
        self.work = self.path / WORK
        self.work.mkdir()
        for left in self.path.parent.glob(f"{prefix}*"):
            _remove_if_left(left)

    def empty(self) -> None:
        """The next program finds nothing of the last one's."""
        for entry in os.scandir(self.work):
            if entry.is_dir(follow_symlinks=False):
                remove(entry.path)
            else:
                os.unlink(entry.path)

    def close(self) -> None:
        """Remove it with all that is in it. A second call does nothing."""
        remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove(path: str | Path) -> None:
    """Remove a folder with all that is in it, also where a program made folders that not even their owner may list (mkdir with mode 0o333)."""
    with contextlib.suppress(OSError):
        for _, names, _, place in os.fwalk(path):  # from above: each is opened up before it is entered
            for name in names:
                os.chmod(name, 0o700, dir_fd=place)
    shutil.rmtree(path, ignore_errors=True)


def _remove_if_left(path: Path) -> None:
    """Remove the folder of an owner that is gone; others, and what is not a folder of this user's, stay."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone meanwhile, somebody else's, no folder
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(folder).st_uid == os.getuid():
            remove(path)
    except BlockingIOError:  # in use
        pass
    finally:
        os.close(folder)

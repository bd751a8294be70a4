"""What attacks are aimed at: files, sockets and a process of the user who runs the sandbox, and the proof that nothing happened to them."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECRET = "to be read by nobody"
ENVIRONMENT_SECRET = "HEADWAY_TEST_SECRET"


class Host:
    """Belongs to user `uid`; `facts` is what attackers are told of it."""

    def __init__(self, folder: Path, uid: int) -> None:
        self.folder = folder
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self._tcp, self._udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._local, self._abstract = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
        self._sockets = [self._tcp, self._udp, self._local, self._abstract]
        addresses: tuple[Any, ...] = (("127.0.0.1", 0), ("127.0.0.1", 0), str(folder / "socket"), f"\0headway-{os.getpid()}-{uid}")
        for place, address in zip(self._sockets, addresses, strict=True):
            place.bind(address)
            if place.type == socket.SOCK_STREAM:
                place.listen()
        for path in (folder, self.secret, folder / "socket"):
            os.chown(path, uid, uid if uid else -1)
        self.victim = subprocess.Popen(["sleep", "3600"], user=uid if uid != os.getuid() else None, env={"SECRET": SECRET})
        self._before = self._state()

    @property
    def facts(self) -> dict[str, Any]:
        """Addresses, paths and ids, as literals of Python."""
        return {"tcp": self._tcp.getsockname(), "udp": self._udp.getsockname(), "local": self._local.getsockname(),
                "abstract": self._abstract.getsockname(), "folder": str(self.folder), "secret": str(self.secret), "victim": self.victim.pid,
                "server_owner": os.getpid()}

    def _state(self) -> dict[str, Any]:
        """All that an attack could change: files with their contents and times, the victim's rights and priorities."""
        pid = self.victim.pid
        files = {path.name: (path.lstat().st_mode, path.lstat().st_uid, path.lstat().st_mtime_ns, path.lstat().st_nlink, path.lstat().st_size)
                 for path in self.folder.iterdir()}
        return {"files": files, "secret": self.secret.read_text(), "limits": Path(f"/proc/{pid}/limits").read_text(),
                "affinity": os.sched_getaffinity(pid), "priority": os.getpriority(os.PRIO_PROCESS, pid),
                "oom": Path(f"/proc/{pid}/oom_score_adj").read_text()}

    def assert_untouched(self) -> None:
        assert self.victim.poll() is None, "the victim lives"
        assert self._state() == self._before
        assert select.select(self._sockets, [], [], 0)[0] == [], "nobody called"

    def close(self) -> None:
        for place in self._sockets:
            place.close()
        self.victim.kill()
        self.victim.wait()


@contextlib.contextmanager
def host(uid: int) -> Iterator[Host]:
    with tempfile.TemporaryDirectory(prefix="headway-host-") as folder:
        there = Host(Path(folder), uid)
        try:
            yield there
        finally:
            there.close()

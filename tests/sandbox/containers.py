"""Containers for tests, as this user or as another: `python -m tests.sandbox.containers UID CONFIG`, one command a line in, what became of it out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from workers.config import ContainerConfig
from workers.sandbox.containers.container import Container, Ran, pack
from workers.sandbox.containers.container_choice import choose
from workers.sandbox.outcome import SandboxError

ROOT = Path(__file__).resolve().parents[2]


def containers(config: ContainerConfig | None = None) -> Container:
    """What this machine has; the test is left out where it has none."""
    try:
        return choose(config or ContainerConfig())
    except SandboxError as error:
        pytest.skip(str(error))


class UsersContainers:
    """Runs commands as user `uid`."""

    def __init__(self, uid: int, config: ContainerConfig) -> None:
        self._popen = subprocess.Popen([sys.executable, "-m", "tests.sandbox.containers", str(uid), msgspec.json.encode(config).decode()], cwd=ROOT,
                                       stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    @property
    def pid(self) -> int:
        """Of the process that starts containers."""
        return self._popen.pid

    def run(self, files: bytes, command: str, over: bytes = b"") -> Ran:
        """As `Container.run`."""
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.write(msgspec.json.encode((files, command, over)) + b"\n")
        self._popen.stdin.flush()
        answer = self._popen.stdout.readline()
        if answer.startswith(b"skip:"):
            pytest.skip(answer.decode())
        return msgspec.json.decode(answer, type=Ran)

    def close(self) -> None:
        """End it."""
        self._popen.communicate(timeout=120)


def main(uid: int, config: ContainerConfig) -> None:
    """Answer commands until the input ends."""
    pack({})  # what is imported late can still be read
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    try:
        made = choose(config)
    except SandboxError as error:
        print(f"skip: as user {uid}: {error}", flush=True)
        return
    for line in sys.stdin:
        files, command, over = msgspec.json.decode(line, type=tuple[bytes, str, bytes])
        print(msgspec.json.encode(made.run(files, command, over)).decode(), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=ContainerConfig))

"""CURVE keys of one run: a server pair for the coordinator, a client pair for its workers.

`python -m workers.transport.keys RUN` makes them; the launcher does so before it submits anything. Files are 0600 in
the run folder (0700): whoever cannot read the run folder gets nothing from any socket.
"""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

import zmq

from workers.run.folder import RunFolder, RunFolderError


@dataclass(frozen=True)
class KeyPair:
    """Z85 text, 40 bytes each."""

    public: bytes
    secret: bytes


def make_keys(run: RunFolder) -> None:
    """Make both pairs. Raises FileExistsError if there are keys already."""
    for name in ("server", "client"):
        public, secret = zmq.curve_keypair()
        descriptor = os.open(run.keys / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(public + b"\n" + secret + b"\n")


def read_keys(run: RunFolder, name: str) -> KeyPair:
    """Read the pair `name` (server or client). Raises `RunFolderError` if it is missing, broken or readable by others, `OSError` where the run
    folder cannot be read now."""
    path = run.keys / name
    try:
        if stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise RunFolderError(f"{path}: readable by others. Run: chmod 600 {path}")
        public, secret = path.read_bytes().split()
        if zmq.curve_public(secret) != public:
            raise ValueError("the halves do not belong together")
    except (FileNotFoundError, PermissionError, ValueError, zmq.ZMQError) as error:
        raise RunFolderError(f"{path}: not a key pair ({error}). Start the run again with the launcher") from error
    return KeyPair(public, secret)


if __name__ == "__main__":
    make_keys(RunFolder.open(Path(sys.argv[1])))

"""What the preflight's probe runs on a node of the cluster, with nothing but Python's standard library: `python -c THIS RUN TOKEN ASKED`.
What needs more is looked at by workers/node_look.py, which gets the JSON object ASKED, once it is there.

Prints one line, PROBE and a JSON object: what is wrong there (`problems`), what is worth knowing (`notes`), the host, its clock, and `nccl`: the
version that its GPUs' processes have ('': not known).
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import time
from pathlib import Path

NEEDED = ("msgspec", "numpy", "psutil", "submitit", "torch", "zmq")
TOKEN = "probe"
OLDEST = (3, 11)


def look_at_folder(path: Path, token: str) -> list[str]:
    """What is wrong with the run folder as this node sees it."""
    try:
        seen = (path / TOKEN).read_text()
        status = path.stat()
    except OSError as error:
        return [f"the run folder {path} is not there ({error.strerror}): it must be on a file system that all nodes share. Choose another run.dir"]
    problems = []
    if seen != token:
        problems.append(f"{path} is another folder there: it must be on a file system that all nodes share. Choose another run.dir")
    if status.st_uid != os.getuid():
        problems.append(f"{path} belongs to user {status.st_uid} there, and jobs run as {os.getuid()}. Ask for user ids that are the same everywhere")
    if status.st_mode & 0o077:
        problems.append(f"{path} can be read by others there (mode {status.st_mode & 0o777:o}); it holds the run's keys. Choose another run.dir")
    try:
        mine = path / f"{TOKEN}.{platform.node()}.{os.getpid()}"
        mine.write_text("")
        mine.unlink()
    except OSError as error:
        problems.append(f"{path} cannot be written there ({error.strerror}). Choose another run.dir")
    return problems


def look_at_python() -> list[str]:
    """What is wrong with this Python."""
    problems = []
    if tuple(map(int, platform.python_version_tuple()[:2])) < OLDEST:
        problems.append(f"{sys.executable} is Python {platform.python_version()}; 3.11 or newer is needed. Set cluster.python or cluster.setup")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        problems.append(f"{sys.executable} has no {', '.join(missing)}. Set cluster.python, cluster.setup or cluster.container, or install them")
    else:
        try:
            import workers.entry  # noqa: F401
        except Exception as error:  # noqa: BLE001  # whatever it is, the launcher tells it
            problems.append(f"workers.entry cannot be imported ({type(error).__name__}: {error}). This code must be on a shared file system too")
    return problems


def look(run: Path, token: str, asked: dict) -> dict:
    """The whole answer. What comes later is only looked at where what it needs is there."""
    problems, notes, nccl = look_at_folder(run, token) + look_at_python(), list[str](), ""
    if not problems:
        from workers import node_look

        problems, notes, nccl = node_look.look(asked)
    return {"problems": problems, "notes": notes, "nccl": nccl, "host": platform.node(), "time": time.time()}


if __name__ == "__main__":
    print("PROBE", json.dumps(look(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))), flush=True)

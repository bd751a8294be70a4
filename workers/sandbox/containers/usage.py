"""What a container takes, seen from outside: its processes are those below the one that started it, as none can leave its namespace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.config import ContainerBackend

OWN = {ContainerBackend.bubblewrap: 5, ContainerBackend.apptainer: 32}
"""Processes and threads of a container beside the command's: the first one of Apptainer's has as many threads as it likes, about ten."""
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Usage:
    """`num_tasks`: processes and threads; `memory_bytes`: resident memory that no file backs; `num_files`: in the container's file system."""

    num_tasks: int
    memory_bytes: int
    num_files: int


def of(pid: int, enough: int) -> Usage:
    """What `pid` and all below it take, tasks in a process namespace of their own; no more are looked at once there are more than `enough` tasks."""
    tasks = memory = files = 0
    for one in below(pid):
        with contextlib.suppress(*_GONE):
            status = _status(one)
            tasks += int(status["Threads"]) * (_depth(status) > _DEPTH)
            memory += sum(int(status.get(name, "0 kB").split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
            if os.stat(place := f"/proc/{one}/root/tmp").st_dev != os.stat("/tmp").st_dev:  # it has a file system of its own already
                there = os.statvfs(place)
                files = max(files, there.f_files - there.f_ffree)
        if tasks > enough:
            break
    return Usage(tasks, memory, files)


def _status(pid: int | str) -> dict[str, str]:
    """What the kernel says of a process."""
    return dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)


def _depth(status: dict[str, str]) -> int:
    """Process namespaces around a process, its own among them."""
    return len(status["NSpid"].split())


_DEPTH = _depth(_status("self"))


def of_user(uid: int) -> int:
    """How many processes and threads user `uid` has on this node."""
    tasks = 0
    for one in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(*_GONE):
            tasks += len(os.listdir(f"/proc/{one}/task")) if os.stat(f"/proc/{one}").st_uid == uid else 0
    return tasks


def below(pid: int) -> Iterator[int]:
    """`pid`, and all processes that it and those below it have started; of those that are gone meanwhile, nothing."""
    left = [pid]
    while left:
        one = left.pop(0)
        yield one
        with contextlib.suppress(*_GONE):
            for task in os.listdir(f"/proc/{one}/task"):
                left += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())

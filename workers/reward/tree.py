"""Finding and killing all descendants of a process, by /proc.

A verifier may start processes, and those may leave its process group. A reward process is a child subreaper, so
whatever is orphaned below it becomes its child: its whole offspring is always found by walking down from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid`, zombies included, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for child in found:  # the list grows while it is walked: breadth first
        found += children.get(child, ())
    return found


def _parent(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None  # it ended while we looked, or belongs to someone else
    # The second field, the program's name in brackets, may itself hold spaces and brackets.
    return int(stat[stat.rindex(")") + 2:].split()[1])


def kill(pid: int) -> None:
    """Kill `pid`, which leads its own process group, with its group and all its descendants.

    It is stopped first, so that it starts nothing more while its descendants are looked up. `pid` must not have been
    waited for yet: until then the number cannot belong to anyone else.
    """
    send(pid, signal.SIGSTOP)
    for child in descendants(pid):
        send(child, signal.SIGKILL)
    send(-pid, signal.SIGKILL)
    send(pid, signal.SIGKILL)


def send(pid: int, number: int) -> None:
    """Send signal `number` to `pid`, or to a group if negative; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)

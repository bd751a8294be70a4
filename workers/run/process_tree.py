"""Finding and killing all descendants of a process, by /proc.

A verifier may start processes, and those may leave its process group. A reward process is a child subreaper, so
whatever is orphaned below it becomes its child: its whole offspring is always found by walking down from it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_kept: set[int] = set()


def keep(pid: int) -> None:
    """Let child `pid` of this process, and all below it, live on between requests: it serves several. Harmless to repeat."""
    _kept.add(pid)


def sweep() -> None:
    """Kill and reap every process below this one but those that are kept and theirs."""
    while left := _unkept():
        for child in left:
            send(child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # a grandchild: it becomes ours when its parent is gone
                os.waitpid(child, 0)


def _unkept() -> list[int]:
    if not _has_children():
        _kept.clear()
        return []
    mine = _own_children()
    _kept.intersection_update(mine)
    orphans = [child for child in mine if child not in _kept]
    return orphans + _below(_children(), orphans) if orphans else []


def _own_children() -> list[int]:
    tasks = Path("/proc/self/task")
    try:
        return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that just ended
        return _children().get(os.getpid(), [])


def _has_children() -> bool:
    """Whether this process has children."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def descendants(pid: int) -> list[int]:
    """Process ids of all descendants of `pid`, zombies included, nearest first."""
    return _below(_children(), (pid,))


def _children() -> dict[int, list[int]]:
    """The children of each process of this machine."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    return children


def _below(children: dict[int, list[int]], pids: Iterable[int]) -> list[int]:
    found = [child for pid in pids for child in children.get(pid, ())]
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

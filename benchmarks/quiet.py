"""How much a figure was disturbed: the cores that processes other than the benchmark's own used meanwhile."""

from __future__ import annotations

import os
import time

import psutil

QUIET = 0.15
"""Cores that others may use beside a figure that counts as undisturbed."""


class Others:
    """Counts from its making; `cores()` tells what was used since then by processes that are not this one or its descendants."""

    def __init__(self) -> None:
        self._started, self._all, self._own = time.monotonic(), _all_s(), _own_s()

    def cores(self) -> float:
        """Mean number of cores. Children that have ended must have been waited for."""
        used = _all_s() - self._all - (_own_s() - self._own)
        return max(0.0, used / (time.monotonic() - self._started))


def _all_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - times.guest - times.guest_nice  # guests are in user as well


def _own_s() -> float:
    own, total = psutil.Process(os.getpid()), 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:  # ended meanwhile: whoever waits for it has its time
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total

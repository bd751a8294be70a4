"""What workers had counted that are gone: totals over a run's workers do not fall when one of them leaves, nor jump when it is there again. Pure.

    a worker leaves, or is lost --its last status--> left --> totals
    its process is there again -------------------> back --> the status that it begins with, until it tells another
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import msgspec

from workers.messages.parts import WorkerStatus

NOW = ("num_running", "rewards_waiting", "judge_waiting")
"""What a worker has at the moment, and takes with it."""
COUNTERS = [name for name, default in msgspec.structs.asdict(WorkerStatus()).items() if not isinstance(default, str)]
REMEMBERED = 1024
"""Workers that may come back; of those that left before them only what they counted is kept."""


class Departed:
    """The counters of the workers that have left, by their addresses."""

    def __init__(self) -> None:
        self._last: dict[bytes, WorkerStatus] = {}
        self._sums: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def left(self, peer: bytes, status: WorkerStatus) -> None:
        """A worker is gone, whose last status this was."""
        self._last[peer] = msgspec.structs.replace(status, waiting_for="", judge_error="", **dict.fromkeys(NOW, 0))
        self._add(self._last[peer], 1)
        if len(self._last) > REMEMBERED:
            del self._last[next(iter(self._last))]

    def back(self, peer: bytes) -> WorkerStatus:
        """A worker registers: what it had counted when it left, if it was here before."""
        if (status := self._last.pop(peer, None)) is None:
            return WorkerStatus()
        self._add(status, -1)
        return status

    def totals(self, statuses: Iterable[WorkerStatus]) -> WorkerStatus:
        """Of all that ever were, with those that are here now."""
        here = list(statuses)
        return WorkerStatus(**{name: max(0, gone) + sum(map(operator.attrgetter(name), here)) for name, gone in self._sums.items()})

    def _add(self, status: WorkerStatus, sign: int) -> None:
        for name in COUNTERS:
            self._sums[name] += sign * getattr(status, name)

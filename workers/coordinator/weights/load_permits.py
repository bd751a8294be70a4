"""Who may interrupt its engines to load new weights. Pure; time is an argument.

    LoadRequest --> waiting, in the order of asking --> loading --> Heartbeat(held) | loss | deadline
                                                         its engine breaks: others have its turn

Of the workers that generate at most half load at the same time (at least one), so that the fleet never stands still as a whole. A worker
that does not generate yet has nothing to interrupt: it loads at once. Without `rolling` everybody does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from workers.messages.parts import Version


class Grant(NamedTuple):
    """A worker that may load a version now."""

    worker: bytes
    version: Version


@dataclass(frozen=True)
class Permit:
    """The time of loading that a worker has; `interrupts`: it generated when it got it."""

    version: Version
    until: float
    interrupts: bool


class LoadPermits:
    """Permits of one coordinator; `limit_s`: how long one lasts at most, seconds."""

    def __init__(self, rolling: bool, limit_s: float) -> None:
        self._rolling, self._limit_s = rolling, limit_s
        self.waiting: dict[bytes, Version] = {}
        self.loading: dict[bytes, Permit] = {}
        self._num_interrupting = 0

    def ask(self, worker: bytes, version: Version, generates: bool, now: float) -> list[Grant]:
        """A worker wants to load `version`; asked again, it keeps its place. Returns its grant if it has got one already, or need not wait, because
        it does not generate yet."""
        permit = self.loading.get(worker)
        if permit is not None and permit.version == version:
            return [Grant(worker, version)]
        self._end(worker)  # it has given up the one that it had, for a newer one
        if self._rolling and generates:
            self.waiting[worker] = version
            return []
        self.waiting.pop(worker, None)
        return [self._grant(worker, version, False, now)]

    def _grant(self, worker: bytes, version: Version, interrupts: bool, now: float) -> Grant:
        self.loading[worker] = Permit(version, now + self._limit_s, interrupts)
        self._num_interrupting += interrupts
        return Grant(worker, version)

    def _end(self, worker: bytes) -> None:
        permit = self.loading.pop(worker, None)
        self._num_interrupting -= permit is not None and permit.interrupts

    def held(self, worker: bytes, version: Version) -> None:
        """A worker's engines hold `version`."""
        permit = self.loading.get(worker)
        if permit is not None and version >= permit.version:
            self._end(worker)
        if worker in self.waiting and version >= self.waiting[worker]:
            del self.waiting[worker]

    def stands_still(self, worker: bytes) -> None:
        """A worker's engines hold nothing, for one of them broke: what it loads interrupts nobody's generation."""
        permit = self.loading.get(worker)
        if permit is not None and permit.interrupts:
            self.loading[worker] = replace(permit, interrupts=False)
            self._num_interrupting -= 1

    def lost(self, worker: bytes) -> None:
        """A worker is gone."""
        self._end(worker)
        self.waiting.pop(worker, None)

    def expire(self, now: float) -> list[bytes]:
        """End the permits whose time is over; returns whose."""
        late = [worker for worker, permit in self.loading.items() if now > permit.until]
        for worker in late:
            self._end(worker)
        return late

    def excuse(self, pause_s: float) -> None:
        """The coordinator did not run for so long until now: what has come meanwhile waits to be read."""
        self.loading = {worker: replace(permit, until=permit.until + pause_s) for worker, permit in self.loading.items()}

    def grant(self, num_generating: int, now: float) -> list[Grant]:
        """Whoever may load from now on; `num_generating`: how many workers hold weights and take leases."""
        granted = []
        while self.waiting and self._num_interrupting < max(1, num_generating // 2):
            worker = next(iter(self.waiting))
            granted.append(self._grant(worker, self.waiting.pop(worker), True, now))
        return granted

"""Who may interrupt its engines to load new weights. Pure; time is an argument.

    LoadRequest --> waiting, in the order of asking --> loading --> Heartbeat(held) | loss | deadline

Of the workers that generate at most half load at the same time (at least one), so that the fleet never stands still as a whole. A worker
that does not generate yet has nothing to interrupt: it loads at once. Without `rolling` everybody does.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from workers.messages.parts import Version


class Grant(NamedTuple):
    """A worker that may load a version now."""

    worker: bytes
    version: Version


@dataclass(frozen=True)
class Permit:
    """The time of loading that a worker has."""

    version: Version
    until: float


class LoadPermits:
    """Permits of one coordinator; `limit_s`: how long one lasts at most, seconds."""

    def __init__(self, rolling: bool, limit_s: float) -> None:
        self._rolling, self._limit_s = rolling, limit_s
        self.waiting: dict[bytes, Version] = {}
        self.loading: dict[bytes, Permit] = {}

    def ask(self, worker: bytes, version: Version) -> list[Grant]:
        """A worker wants to load `version`; asked again, it keeps its place. Returns the grant again if it has got one already."""
        permit = self.loading.get(worker)
        if permit is not None and permit.version == version:
            return [Grant(worker, version)]
        self.loading.pop(worker, None)  # it has given up the one that it had, for a newer one
        self.waiting[worker] = version
        return []

    def held(self, worker: bytes, version: Version) -> None:
        """A worker's engines hold `version`."""
        permit = self.loading.get(worker)
        if permit is not None and version >= permit.version:
            del self.loading[worker]
        if worker in self.waiting and version >= self.waiting[worker]:
            del self.waiting[worker]

    def lost(self, worker: bytes) -> None:
        """A worker is gone."""
        self.loading.pop(worker, None)
        self.waiting.pop(worker, None)

    def expire(self, now: float) -> list[bytes]:
        """End the permits whose time is over; returns whose."""
        late = [worker for worker, permit in self.loading.items() if now > permit.until]
        for worker in late:
            del self.loading[worker]
        return late

    def grant(self, generating: Collection[bytes], now: float) -> list[Grant]:
        """Whoever may load from now on; `generating`: the workers that hold weights and take leases."""
        room = max(1, len(generating) // 2) - sum(worker in generating for worker in self.loading)
        granted = []
        for worker, version in list(self.waiting.items()):
            if self._rolling and worker in generating:
                if room <= 0:
                    continue
                room -= 1
            del self.waiting[worker]
            self.loading[worker] = Permit(version, now + self._limit_s)
            granted.append(Grant(worker, version))
        return granted

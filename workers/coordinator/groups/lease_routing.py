"""Which worker gets the next lease: the one with the fewest tokens in flight for its capacity, of those that have room. Pure.

Samples tell who has room, tokens who is busy: the answers of one worker may be far longer than those of another. A group goes to one worker
whole, so that its samples share their prompt's cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.coordinator.worker_registry import Worker


@dataclass
class Room:
    """A worker's samples and tokens. `capacity`, `free`: samples; `tokens`: in flight, as far as is known."""

    capacity: int
    free: int
    tokens: float


class Rooms:
    """The room of all workers that take leases, by peer."""

    def __init__(self, rooms: dict[bytes, Room]) -> None:
        self._rooms = rooms

    def least_busy(self, num_samples: int) -> bytes | None:
        """The worker that so many samples go to, together; None if nobody has room for them."""
        with_room = [peer for peer, room in self._rooms.items() if room.free >= num_samples]
        return min(with_room, key=lambda peer: (self._rooms[peer].tokens / self._rooms[peer].capacity, -self._rooms[peer].free), default=None)

    def take(self, peer: bytes, num_samples: int, tokens: float) -> None:
        """Note a lease of so many samples, which will have so many tokens."""
        self._rooms[peer].free -= num_samples
        self._rooms[peer].tokens += tokens

    def keep_for(self, num_samples: int) -> None:
        """Give nothing smaller to the worker that will soonest have room for so many samples."""
        able = [peer for peer, room in self._rooms.items() if room.capacity >= num_samples]
        if able:
            del self._rooms[max(able, key=lambda peer: self._rooms[peer].free)]


def room_of(worker: Worker, leased: Iterable[tuple[str, int, int]], tokens_per_sample: float) -> Room:
    """The room of `worker`, who has `leased` (group, attempt, number of samples).

    What it has measured itself counts as far as it still runs; `tokens_per_sample` stands for what it has not: leases that are younger
    than its last heartbeat, and everything where it measures nothing.
    """
    leases = list(leased)
    measured = [lease for lease in leases if lease[:2] in worker.measured] if worker.tokens_in_flight else []
    unmeasured = sum(num_samples for *_, num_samples in leases) - sum(num_samples for *_, num_samples in measured)
    known = worker.tokens_in_flight * len(measured) / len(worker.measured) if measured else 0.0
    return Room(worker.capacity, worker.capacity - sum(num_samples for *_, num_samples in leases), known + unmeasured * tokens_per_sample)

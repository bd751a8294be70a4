"""Which worker gets the next lease: the one with the fewest tokens in flight for its capacity, of those that have room. Pure.

    a worker whose leases or heartbeat have changed --> its Room --> ranked by load, for each size of lease --> least_busy

Samples tell who has room, tokens who is busy: the answers of one worker may be far longer than those of another. Where the KV cache is full before
all slots are, it sets how many samples that is. A group goes to one worker whole, so that its samples share their prompt's cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.coordinator.ranking import Ranking
from workers.coordinator.registered_worker import SUSPECT_AFTER, Worker

KV_AHEAD = 1.5
"""Samples in flight may come to so many times the tokens of the KV cache once all have ended: by then others have left it, and as with slots
(engine_pool.py) there is always one at hand when one ends."""


@dataclass(frozen=True)
class Room:
    """A worker's samples and tokens. `capacity`, `free`: samples; `tokens`: in flight, as far as is known; `slot`: its own; `suspect`: leases
    go to others as long as there are others; `failed`: a group has failed there since one was finished, so that others come first; `known`:
    samples of the leases that it has told of, and how many of them are `live`."""

    capacity: int
    free: int
    tokens: float
    slot: int = 0
    suspect: bool = False
    known: int = 0
    live: int = 0
    failed: bool = False


class Rooms:
    """The room of all workers that take leases, by peer. `group_size`: samples of a group; `sizes`: of every lease that there is."""

    def __init__(self, group_size: int, sizes: Iterable[int]) -> None:
        self.rooms: dict[bytes, Room] = {}
        self._group_size = group_size
        self._num_trusted = self._known = self._live = 0
        self._groups = {False: 0, True: 0}  # that those have room for who are not suspect, and who are
        self._by_load: dict[int, Ranking[bytes]] = {size: Ranking() for size in sorted({group_size, *sizes})}
        self._by_free: Ranking[bytes] = Ranking()
        self._kept: bytes | None = None

    def put(self, peer: bytes, room: Room | None) -> None:
        """Note how a worker's room is now; None: it takes no leases."""
        self._count(self.rooms.pop(peer, None), -1)
        if room is not None:
            self.rooms[peer] = room
        self._count(room, 1)
        self._rank(peer)

    def _count(self, room: Room | None, change: int) -> None:
        if room is not None:
            self._num_trusted += change * (not room.suspect)
            self._groups[room.suspect] += change * (room.capacity // self._group_size)
            self._known += change * room.known
            self._live += change * room.live

    @property
    def num_groups(self) -> float:
        """How many groups all workers that get leases can run together, whose samples end one after the other as they do now."""
        live = max(1 / self._group_size, self._live / self._known) if self._known else 1.0
        return self._groups[not self._num_trusted] / live

    def _rank(self, peer: bytes) -> None:
        room = self.rooms.get(peer)
        for size, ranking in self._by_load.items():
            if room is not None and room.free >= size and peer != self._kept:
                ranking.put(peer, (room.suspect, room.failed, room.tokens / room.capacity, -room.free, room.slot))
            else:
                ranking.drop(peer)
        if room is not None and room.capacity >= self._group_size:
            self._by_free.put(peer, (room.suspect, -room.free, room.slot))
        else:
            self._by_free.drop(peer)

    def least_busy(self, num_samples: int) -> bytes | None:
        """The worker that so many samples go to, together; None if nobody has room for them."""
        return self._trusted(self._by_load[num_samples].first())

    def _trusted(self, peer: bytes | None) -> bytes | None:
        return None if peer is None or (self.rooms[peer].suspect and self._num_trusted) else peer

    def keep_for_group(self) -> None:
        """Give nothing smaller to the worker that will soonest have room for a group, until `let_go`."""
        self._kept = self._trusted(self._by_free.first())
        if self._kept is not None:
            self._rank(self._kept)

    def let_go(self) -> None:
        """Every worker may get leases again."""
        if (kept := self._kept) is not None:
            self._kept = None
            self._rank(kept)


def room_of(worker: Worker, leased: Iterable[tuple[str, int, int]], tokens_per_sample: float, at_least: int = 1) -> Room:
    """The room of `worker`, who has `leased` (group, attempt, number of samples).

    What it has measured itself counts as far as it still runs: samples of a group that have ended leave room, before the last one has.
    `tokens_per_sample` stands for what it has not: leases that are younger than its last heartbeat, and everything where it measures nothing.
    It takes `at_least` so many samples, however small its cache: else nobody would sample a group of long answers. Whom one failure more makes
    suspect takes no more than that.
    """
    leases = list(leased)
    samples = sum(num_samples for *_, num_samples in leases)
    measured = [lease for lease in leases if lease[:2] in worker.measured]
    known = sum(num_samples for *_, num_samples in measured)
    live = known if worker.live is None else min(worker.live, known)
    tokens = worker.tokens_in_flight * len(measured) / len(worker.measured) if measured else 0.0
    unmeasured = samples - known if worker.tokens_in_flight else samples
    tokens += unmeasured * tokens_per_sample
    capacity = _capacity(worker, samples - known + live, tokens, tokens_per_sample, at_least)
    if worker.failed_in_a_row == SUSPECT_AFTER - 1:
        capacity = min(capacity, at_least)
    return Room(capacity, capacity - (samples - known) - live, tokens, worker.slot, worker.suspect, known, live, worker.failed_in_a_row > 0)


def _capacity(worker: Worker, running: int, tokens: float, tokens_per_sample: float, at_least: int) -> int:
    """How many samples `worker` takes, who has so many `running` that come to so many `tokens`: where it tells what its KV cache holds, no more than
    that has room for, new ones being as long as others are."""
    if not worker.kv_tokens or not tokens_per_sample:
        return worker.capacity
    more = max(0, int((KV_AHEAD * worker.kv_tokens - tokens) / tokens_per_sample))
    return min(worker.capacity, max(at_least, running + more))

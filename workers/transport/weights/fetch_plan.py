"""Pure planning of a fetch: which chunk is asked of whom, and what follows when a source fails. No sockets, no clock.

    waiting at its best source --request--> outstanding --received--> being checked --verified--> done
         ^                                       |                          |
         +------- next source left <-- lost, unavailable, overdue ----------+ corrupt

A source has at most `window` chunks outstanding or being checked. A chunk that no source is left for makes the plan `stuck`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.weights.manifest import Chunk

MAX_CORRUPT = 3


@dataclass(frozen=True)
class Request:
    """Ask `source` for `chunk`. `delta`: a difference to the base will do."""

    source: str
    chunk: Chunk
    delta: bool


@dataclass
class Source:
    """One endpoint, and what it owes us; `heard`: when something came of it last, or was first asked."""

    waiting: deque[Chunk] = field(default_factory=deque)
    outstanding: dict[int, Request] = field(default_factory=dict)
    checking: dict[int, Request] = field(default_factory=dict)
    heard: float = 0.0
    num_corrupt: int = 0
    lost: bool = False


class FetchPlan:
    """Plans the fetch of `wanted`: from `parents`, best first, and then from the one of `origins` that a chunk's `source` names.

    Times are seconds of any clock.
    """

    def __init__(self, wanted: Sequence[Chunk], parents: Sequence[str], origins: Sequence[str], *, window: int, patience_s: float,
                 delta: bool = False) -> None:
        self._parents, self._origins, self._window, self._patience_s, self._delta = list(parents), origins, window, patience_s, delta
        self._sources = {endpoint: Source() for endpoint in (*parents, *origins)}
        self._candidates: dict[int, list[str]] = {}  # of chunks of which a source has failed
        self._left = {chunk.number for chunk in wanted}
        self.stuck: list[Chunk] = []
        for chunk in wanted:
            self._assign(chunk)

    @property
    def done(self) -> bool:
        """Whether every chunk is there and checked."""
        return not self._left

    def requests(self, now: float) -> list[Request]:
        """What to ask now; it is outstanding from here on."""
        found: list[Request] = []
        for endpoint, source in self._sources.items():
            while source.waiting and len(source.outstanding) + len(source.checking) < self._window:
                chunk = source.waiting.popleft()
                if not source.outstanding:
                    source.heard = now
                source.outstanding[chunk.number] = Request(endpoint, chunk, self._delta)
                found.append(source.outstanding[chunk.number])
        return found

    def received(self, endpoint: str, number: int, now: float) -> Request | None:
        """Something came for chunk `number`: it is being checked until `verified` or `corrupt`. None if it was not asked for there."""
        source = self._sources[endpoint]
        request = source.outstanding.pop(number, None)
        if request is not None:
            source.heard = now
            source.checking[number] = request
        return request

    def verified(self, endpoint: str, number: int) -> None:
        """The chunk is what was announced, and in its place."""
        del self._sources[endpoint].checking[number]
        self._left.discard(number)

    def corrupt(self, endpoint: str, number: int, delta: bool) -> bool:
        """It is not. A difference (`delta`) may be wrong because our base is: from here on only whole chunks are asked for. True where the
        source is given up."""
        source = self._sources[endpoint]
        chunk = source.checking.pop(number).chunk
        candidates = self._candidates_of(chunk)
        if endpoint in candidates:  # it is asked again after all others
            candidates.remove(endpoint)
            candidates.append(endpoint)
        if delta:
            self._delta = False
        else:
            source.num_corrupt += 1
        self._assign(chunk, first=True)
        return source.num_corrupt >= MAX_CORRUPT and self.lost(endpoint)

    def unavailable(self, endpoint: str, number: int) -> None:
        """The source does not have this chunk, and will not get it."""
        request = self._sources[endpoint].outstanding.pop(number, None)
        if request is not None:
            self._candidates_of(request.chunk).remove(endpoint)
            self._assign(request.chunk, first=True)

    def overdue(self, now: float) -> list[str]:
        """Sources that owe us something and of which nothing has come for too long."""
        return [endpoint for endpoint, source in self._sources.items() if source.outstanding and now - source.heard > self._patience_s]

    def lost(self, endpoint: str) -> bool:
        """Nothing more is asked of this source; what it owes is asked of others. What came of it and is being checked still counts. False if
        it was given up before."""
        source = self._sources[endpoint]
        if source.lost:
            return False
        source.lost = True
        owed, waiting = [request.chunk for request in source.outstanding.values()], list(source.waiting)
        source.outstanding.clear()
        source.waiting.clear()
        for chunk in reversed(owed):
            self._assign(chunk, first=True)
        for chunk in waiting:
            self._assign(chunk)
        return True

    def _candidates_of(self, chunk: Chunk) -> list[str]:
        if chunk.number not in self._candidates:
            origin = self._origins[chunk.source: chunk.source + 1]
            self._candidates[chunk.number] = list(dict.fromkeys((*self._parents, *origin)))
        return self._candidates[chunk.number]

    def _assign(self, chunk: Chunk, first: bool = False) -> None:
        endpoint = next((endpoint for endpoint in self._candidates_of(chunk) if not self._sources[endpoint].lost), None)
        if endpoint is None:
            self.stuck.append(chunk)
        elif first:
            self._sources[endpoint].waiting.appendleft(chunk)
        else:
            self._sources[endpoint].waiting.append(chunk)

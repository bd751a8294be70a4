"""Where calls wait for each other: requests while generation is paused or weights change, updates for the requests that run.

    /generate --> [gate] --inside--> engine          closed while paused, and while an update from outside a pause waits or works
    update    --> one at a time; outside a pause only once nobody is inside; in a pause at once

SGLang does the same (tokenizer_manager.py: is_pause_cond, model_update_lock), so neither an abort nor a retraction reaches a request that
still stands before the gate. Two updates of SGLang from disk in one pause lose the first one's answer and then everything hangs: here the
second one is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from workers.rollout.engines.servers.embedded.api import require


class Gate:
    """All calls come from one event loop. `num_waiting`: requests before the gate. `turn`: held by the update that is under way; one that leaves
    the gate open takes nothing else."""

    def __init__(self) -> None:
        self.paused = False
        self.num_waiting = 0
        self._num_inside = 0
        self._closed_by_update = False
        self._session_at_work = False
        self.turn = asyncio.Lock()
        self._waiters: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and count as running until the block is left."""
        self.num_waiting += 1
        try:
            await self._until(lambda: not self.paused and not self._closed_by_update)
        finally:
            self.num_waiting -= 1
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1
            self._tell()

    @asynccontextmanager
    async def update(self, in_session: bool = False) -> AsyncIterator[None]:
        """Wait until weights may change. Calls of an update session take turns; of others, the second in a pause is refused (`RequestError`)."""
        require(not self.paused or in_session or not self.turn.locked(), "update", "a second one", "another one is under way",
                "Send it when that one has answered")
        async with self.turn:
            try:
                self._session_at_work = in_session and self.paused
                if not self.paused:
                    self._closed_by_update = True
                    await self._until(lambda: not self._num_inside)
                yield
            finally:
                self._closed_by_update = self._session_at_work = False
                self._tell()

    async def open(self) -> None:
        """The pause is over, once no call of an update session is at work."""
        await self._until(lambda: not self._session_at_work)
        self.paused = False
        self._tell()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._waiters.append(waiter := asyncio.get_running_loop().create_future())
            await waiter

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

"""Keeps the engine at the newest weights: interrupts generation, loads, lets it go on.

    announcement --> fetch and verify (generation goes on) --> pause --> load --> continue --> held = version
Updates that arrive faster than they can be loaded are skipped: only the newest counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from workers.config import Interrupt
from workers.messages.types import Announcement, Version
from workers.rollout.engine_client import BadRequest, EngineClient
from workers.weights.manifest import MANIFEST, WeightsError, verify

NEWER_S = 10.0


class WeightHolder:
    """What the engine of this worker holds. `changed` is awaited after every change, so that the coordinator knows."""

    def __init__(self, engine: EngineClient, interrupt: Interrupt, changed: Callable[[], Awaitable[None]],
                 in_touch: Callable[[], bool] = lambda: True) -> None:
        """`in_touch`: whether there is a coordinator; without one a version may be gone with the training job that published it."""
        self.held: Version | None = None
        self.fetching: Version | None = None
        self.num_updates = 0
        self.num_pauses = 0  # beginnings and ends of pauses: odd while one is on
        self.update_s = 0.0
        self._engine, self._interrupt, self._changed, self._in_touch = engine, interrupt, changed, in_touch
        self._newest: Announcement | None = None
        self._news = asyncio.Event()
        self._held_something_new = asyncio.Condition()

    def announce(self, announcement: Announcement) -> None:
        """Take note of a newer version."""
        self._newest = announcement
        self._news.set()

    async def at_least(self, version: Version) -> None:
        """Wait until the engine holds `version` or a newer one."""
        async with self._held_something_new:
            await self._held_something_new.wait_for(lambda: self.held is not None and self.held >= version)

    async def follow(self) -> None:
        """Load every announced version, newest first, for as long as the worker runs. Raises `WeightsError`, `EngineError`."""
        while True:
            await self._news.wait()
            self._news.clear()
            announcement = self._newest
            assert announcement is not None
            try:
                await self._update(announcement)
            except WeightsError as error:
                # The publisher may have removed it because there is a newer one, of which we hear in a moment: then take that. It may be
                # gone itself: then the next training job will publish another one. Otherwise it is an error.
                is_newest = self._newest is announcement and not (_is_gone(announcement) and await self._newer_comes())
                if is_newest and self._in_touch():
                    raise
                print(f"warning: version {announcement.version} is skipped: {error}", flush=True)
                self.fetching = None

    async def _newer_comes(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWER_S):
                await self._news.wait()
        return self._news.is_set()

    async def _update(self, announcement: Announcement) -> None:
        folder = Path(announcement.folder)
        self.fetching = announcement.version
        await self._changed()
        await asyncio.to_thread(verify, folder, announcement.version, announcement.digest)
        started = time.monotonic()
        self.num_pauses += 1
        await self._engine.pause(self._interrupt.value)
        try:
            await self._engine.update_weights(folder, announcement.version, flush_cache=self._interrupt is not Interrupt.in_place)
        except BadRequest as error:
            if _is_gone(announcement):
                raise WeightsError(f"{folder}: version {announcement.version} was removed before it was loaded") from error
            raise
        finally:
            await self._engine.resume()
            self.num_pauses += 1
        self.update_s += time.monotonic() - started
        self.num_updates += 1
        self.held, self.fetching = announcement.version, None
        async with self._held_something_new:
            self._held_something_new.notify_all()
        await self._changed()


def _is_gone(announcement: Announcement) -> bool:
    return not (Path(announcement.folder) / MANIFEST).exists()

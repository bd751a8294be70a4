"""Keeps the engines at the newest weights: fetches what is announced, and has one engine after the other load it.

    announcement --> fetch and verify (generation goes on) --> permit --> each engine: pause, load, continue --> held = version
Updates that arrive faster than they can be loaded are skipped: only the newest counts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from workers.messages.parts import Announcement, Version
from workers.model.architecture import Architecture, ModelError
from workers.model.compatibility import check_same_model
from workers.rollout.engines.engine import Weights
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.weights.fetch import WeightsSuperseded
from workers.weights.manifest import WeightsError

NEWER_S = 10.0


async def _nothing_arrives() -> None:
    pass


class Fetch(Protocol):
    """How weights come to this node (fetch.py)."""

    async def fetch(self, announcement: Announcement) -> Path:
        """Their folder here, complete and verified. Raises `WeightsError`, `WeightsSuperseded`."""

    def permit(self, version: Version) -> AbstractAsyncContextManager[None]:
        """The time in which this worker's engines load them."""


class WeightHolder:
    """What the engines of this worker are to hold. `changed` is awaited after every change, so that the coordinator knows."""

    def __init__(self, fetch: Fetch, changed: Callable[[], Awaitable[None]], in_touch: Callable[[], bool] = lambda: True,
                 architecture: Architecture | None = None) -> None:
        """`in_touch`: whether there is a coordinator; without one a version may be gone with the training job that published it.
        `architecture`: of the model that is served, which every version must be of; SGLang would take any.

        `newest`: what is on this node; None where newer weights have come by broadcast. `arriving` (to be set) returns once no broadcast is
        under way."""
        self.fetching: Version | None = None
        self.newest: Weights | None = None
        self.num_updates = 0
        self.by_broadcast = False  # how the last one came
        self.arriving: Callable[[], Awaitable[None]] = _nothing_arrives
        self._lacking = False
        self._received: Version | None = None
        self._fetch, self._changed, self._in_touch, self._architecture = fetch, changed, in_touch, architecture
        self._announced: Announcement | None = None
        self._news = asyncio.Event()

    def announce(self, announcement: Announcement) -> None:
        """Take note of a newer version."""
        self._announced = announcement
        self._news.set()

    def received(self, version: Version) -> None:
        """Engines have got `version` by broadcast: what is on this node is outdated."""
        self.num_updates += 1
        self._received, self.by_broadcast = version, True
        if self.newest is not None and self.newest.version < version:
            self.newest = None

    def look_again(self) -> None:
        """An engine lacks the newest weights, and there is nothing on this node that it could load."""
        self._lacking = True
        if self._announced is not None:
            self._news.set()

    async def follow(self, engines: Engines) -> None:
        """Have every announced version loaded, newest first, for as long as the worker runs. Raises `WeightsError`, `EngineError`."""
        while True:
            await self._news.wait()
            self._news.clear()
            announcement = self._announced
            assert announcement is not None
            await self.arriving()
            if engines.held is not None and engines.held >= announcement.version and not self._lacking:
                continue  # it can be had in more ways now, or has come by broadcast
            try:
                await self._update(announcement, engines)
            except WeightsSuperseded as error:
                print(f"version {announcement.version} is skipped: {error}", flush=True)
            except WeightsError as error:
                # The publisher may have removed it because there is a newer one, of which we hear in a moment: then take that. It may be
                # gone itself: then the next training job will publish another one. Otherwise it is an error.
                is_newest = self._announced is announcement and not await self._newer_comes()
                if is_newest and self._in_touch():
                    raise
                print(f"warning: version {announcement.version} is skipped: {error}", flush=True)
            self.fetching = None

    async def _newer_comes(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(NEWER_S):
                await self._news.wait()
        return self._news.is_set()

    async def _update(self, announcement: Announcement, engines: Engines) -> None:
        version = self.fetching = announcement.version
        await self._changed()
        folder = await self._fetch.fetch(announcement)
        if self._architecture is not None:
            try:
                await asyncio.to_thread(check_same_model, folder, self._architecture)
            except ModelError as error:
                raise WeightsError(f"version {version}: {error}") from error
        if self._received is None or version >= self._received:
            self.newest, self._lacking = Weights(version, folder), False
        async with self._fetch.permit(version):
            await engines.catch_up()
            self.num_updates += 1
            self.fetching, self.by_broadcast = None, False
            await self._changed()

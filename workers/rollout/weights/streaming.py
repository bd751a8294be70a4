"""This worker's part in the tree by which weights are streamed: fetches into the node's store, and serves on what is there.

    Sources --> transport/weights/fetcher.py (a thread) --> store --> folder
                     offer_incoming |                        | offer
                                    +--> weight server (a thread) --> other nodes

Workers of one node share its store. The one that leads fetches; the others give it a head start, then wait for it in the store, and take over
if it dies. Kept are the version that was fetched last and the one that is being fetched: for the engines, for other nodes, and
as the base of differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from workers.config import Config
from workers.messages.from_coordinator import Sources
from workers.messages.parts import Announcement, Version
from workers.run.folder import RunFolder
from workers.transport.weights.fetcher import FetchProgress, fetch
from workers.transport.weights.server import WeightKeys, WeightServer
from workers.weights.manifest import MANIFEST, WeightsError
from workers.weights.partial_version import Incoming
from workers.weights.store import open_store

HEAD_START_S, LOOK_S = 1.0, 0.05


class Streaming:
    """`endpoint`: where others fetch from here. `arrived`: bytes of the version that is being fetched; `received`: bytes that came from other
    nodes, and `num_corrupt` chunks that were not what was announced, since the start. Raises `WeightsError`, `ConfigError`."""

    def __init__(self, run: RunFolder, config: Config) -> None:
        self._config = config.weights
        self._keys = WeightKeys.read(run)
        self._store = open_store(run.store(config.weights.dir))
        try:
            self._server = WeightServer(config.transport, config.weights, self._keys)
        except BaseException:
            self._store.leave()
            raise
        self.endpoint = self._server.endpoint
        self.arrived = self.received = self.num_corrupt = 0
        self.held: Version | None = None
        self._otherwise = False
        self._offered: set[Version] = set()

    @property
    def refused(self) -> tuple[int, int]:
        """Connections without the run's keys, and messages that cannot be read."""
        return self._server.counters.num_refused, self._server.counters.num_malformed

    def expect(self, version: Version) -> None:
        """From now on others may ask for `version`: they wait until it arrives."""
        self._offered.add(version)
        self._server.expect(version)

    async def fetch(self, announcement: Announcement, sources: Sources, failed: Callable[[list[str]], None]) -> Path:
        """The folder of the announced version in the node's store, verified. `failed` is told, in the event loop, which of `sources` have
        failed so far. Raises `WeightsError`; when cancelled, ends soon, and keeps what has arrived."""
        version, loop, cancelled = announcement.version, asyncio.get_running_loop(), threading.Event()
        self.arrived = 0
        before = (self.received, self.num_corrupt)

        def report(progress: FetchProgress) -> None:
            loop.call_soon_threadsafe(note, progress)

        def note(progress: FetchProgress) -> None:
            self.arrived = progress.arrived
            self.received, self.num_corrupt = before[0] + progress.received, before[1] + progress.num_corrupt
            if progress.failures:  # each begins with its endpoint
                failed([endpoint for endpoint in sources.endpoints if any(failure.startswith(f"{endpoint}: ") for failure in progress.failures)])

        def transfer() -> Path:
            self._release({version} if self.held is None else {version, self.held})
            folder = fetch(announcement, sources.endpoints, self._store, self._config, self._keys, cancelled=cancelled, report=report,
                           on_begin=self._server.offer_incoming)
            delta = self._store.delta(folder)
            self._server.offer(version, folder, (folder / MANIFEST).read_bytes(), delta if delta.exists() else None)
            return folder

        if not sources.leads:
            await self._give_head_start(version)
        job = asyncio.ensure_future(asyncio.to_thread(transfer))
        try:
            folder = await asyncio.shield(job)
        except (asyncio.CancelledError, WeightsError):
            cancelled.set()
            await asyncio.gather(job, return_exceptions=True)
            self._server.withdraw(version)  # whoever waits for it here goes elsewhere
            self._offered.discard(version)
            raise
        self.held, self._otherwise = version, False
        return folder

    def has_begun(self, version: Version) -> bool:
        """Whether something of `version` has come to this node, be it by another worker that this one waits for."""
        return self.arrived > 0 or self._store.is_held(version) or Incoming.last_arrival(self._store.held(version)) > 0

    def came_otherwise(self, version: Version) -> None:
        """`version` has come here another way: after the second in a row, the memory of what was streamed before is given back."""
        if self._otherwise:
            self._release({version})
            self.held = None
        self._otherwise = True

    async def _give_head_start(self, version: Version) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEAD_START_S):
                while not self._store.is_held(version):
                    await asyncio.sleep(LOOK_S)

    def _release(self, keep: set[Version]) -> None:
        for version in self._offered - keep:
            self._server.withdraw(version)
        self._offered &= keep
        self._store.remove_older(keep)

    def close(self) -> None:
        """Serve no more, and leave the store."""
        self._server.close()
        self._store.leave()

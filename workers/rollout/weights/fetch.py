"""Brings announced versions of the weights to this node.

    announcement --ways--> zmq:  SourcesRequest -> Sources -> streaming.py: chunks into the node's store, served on as they come --> folder
                           disk: shared_storage.py: seen on storage that all nodes share, verified where it lies ------------------> folder
                                 its sources fail: asked again, until nothing has come for weights.timeout_s
                           none is left: TransportFailed -> the trainer offers another one -> the same announcement, with more ways

    folder of adapters alone (weights.adapter_only) --merging.py--> folder
    folder --> LoadRequest -> LoadGranted --> (the holder loads it) --> Heartbeat(held)

Waits, each named by `waiting_for`: for the coordinator's answers, for another way, each at most weights.timeout_s while there is a
coordinator. A transfer that has begun is finished though a newer version is announced: else updates that come faster than a transfer
would never arrive at all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

from workers.config import Config, Transport
from workers.messages.from_coordinator import LoadGranted, Sources
from workers.messages.from_worker import LoadRequest, SourcesRequest, TransportFailed
from workers.messages.parts import Announcement, Message, Version
from workers.rollout.weights.attempts import DISK, ZMQ, Attempts, offered
from workers.rollout.weights.merging import Merging
from workers.rollout.weights.news import News
from workers.rollout.weights.shared_storage import from_shared_storage
from workers.rollout.weights.streaming import Streaming
from workers.run.folder import RunFolder
from workers.weights.manifest import WeightsError

PERMIT_TIMEOUTS = 2
"""After so many times weights.timeout_s without a permit a worker loads all the same."""
NEWS_BEATS = 2
"""So many heartbeats after a failure this worker would have heard of a newer version."""
MAX_SKIPPED = 3
"""So many versions in a row that could be had in no way are no chance."""


class WeightsSuperseded(RuntimeError):
    """A version that need not be fetched any more, or cannot be: a newer one has been announced, or this worker leaves."""


class WeightFetch:
    """What this worker does to get weights. The worker passes on what it hears: `announced` for every announcement, `take` for Sources and
    LoadGranted. `send`: to the coordinator; `in_touch`: whether there is one. `endpoint`: where others fetch from here, for
    Register ('' for nowhere). `elsewhere`: has a version come to this replica's other nodes, from an endpoint ('': shared storage), by the
    end of a block. `waiting_for`: in words for people, '' while nothing is waited for.

    `via`, `fetch_s`, `fetch_bytes`, `num_fallbacks`, `num_refetched`: as in `WorkerStatus`.
    """

    def __init__(self, run: RunFolder, config: Config, send: Callable[[Message], Awaitable[None]], in_touch: Callable[[], bool] = lambda: True,
                 elsewhere: Callable[[Announcement, str, Version | None], AbstractAsyncContextManager[None]] = lambda *_: nullcontext()) -> None:
        self._config, self._send, self._in_touch, self._elsewhere = config.weights, send, in_touch, elsewhere
        self._streaming = None if config.weights.transport is Transport.disk else Streaming(run, config)
        self._merging = Merging(run, config) if config.weights.adapter_only else None
        self.endpoint = self._streaming.endpoint if self._streaming else ""
        self.waiting_for = self.via = ""
        self.fetch_s, self.num_fallbacks, self._num_skipped = 0.0, 0, 0
        self._prefers = ZMQ
        self._newest: Announcement | None = None
        self._sources: Sources | None = None
        self._granted: Version | None = None
        self._news = News(config.transport.heartbeat_s, send)
        self._one_at_a_time = asyncio.Lock()

    @property
    def fetch_bytes(self) -> int:
        """Bytes that came from other nodes."""
        return self._streaming.received if self._streaming else 0

    @property
    def _arrived(self) -> int:
        return self._streaming.arrived if self._streaming else 0

    @property
    def num_refetched(self) -> int:
        """Chunks that came with a wrong digest, and were asked for elsewhere."""
        return self._streaming.num_corrupt if self._streaming else 0

    @property
    def refused(self) -> tuple[int, int]:
        """Connections to this worker without the run's keys, and messages that cannot be read."""
        return self._streaming.refused if self._streaming else (0, 0)

    def announced(self, announcement: Announcement) -> None:
        """Take note of a newer version, or of more ways to get the one that is being fetched."""
        self._newest = announcement
        self._news.tell()

    def take(self, message: Message) -> None:
        """Sources and LoadGranted from the coordinator; anything else is ignored."""
        match message:
            case Sources():
                self._sources = message
            case LoadGranted():
                self._granted = message.version
        self._news.tell()

    async def close(self) -> None:
        """Serve others no more, and leave the node's stores."""
        for part in (self._streaming, self._merging):
            if part is not None:
                await asyncio.to_thread(part.close)

    # -- fetching ------------------------------------------------------------------------------------------------------

    async def fetch(self, announcement: Announcement) -> Path:
        """The folder of this version on this node, complete and verified; it stays until the fetch after the next one. Raises `WeightsError`
        where no transport brings it, `WeightsSuperseded` where a newer version makes it pointless."""
        async with self._one_at_a_time:
            started = time.monotonic()
            try:
                folder = await self._fetch(announcement)
                if self._merging is not None:
                    self.waiting_for = f"the adapters of version {announcement.version} to be merged"
                    folder = await self._merging.merge(announcement.version, folder)
                return folder
            finally:
                self.fetch_s += time.monotonic() - started
                self.waiting_for = ""

    async def _fetch(self, announcement: Announcement) -> Path:
        tried = Attempts(announcement.version, self._config.timeout_s, self._arrived, time.monotonic())
        while True:
            way = tried.next(announcement, self._prefers)
            if way is None:
                announcement = await self._another_way(announcement, tried)
                continue
            try:
                kept = self._merging or self._streaming
                async with self._elsewhere(announcement, "" if way == DISK else self.endpoint, kept.held if kept else None):
                    folder = await (self._from_storage if way == DISK else self._stream)(announcement)
            except WeightsError as error:
                print(f"version {announcement.version} could not be had by {way}: {error}", flush=True)
                tried.failed(way, error, self._arrived, time.monotonic())
                self._prefers = DISK if way == ZMQ else ZMQ
                continue
            self._prefers, self._num_skipped = way, 0
            if way == DISK and self._streaming is not None:
                await asyncio.to_thread(self._streaming.came_otherwise, announcement.version)
            self.num_fallbacks += way != self._config.transport.value
            self.via = way
            return folder

    async def _another_way(self, announcement: Announcement, tried: Attempts) -> Announcement:
        """The announcement of the same version with a way that has not failed, or may be tried again. Raises `WeightsSuperseded`,
        `WeightsError`."""
        version, causes = announcement.version, tried.causes

        def found() -> Announcement | None:
            newest = self._newest
            more = newest is not None and newest.version == version and not causes.keys() >= set(offered(newest))
            return newest if more or self._is_old(version) else None

        request = [TransportFailed(version, way, cause) for way, cause in causes.items()][-1:]
        self.waiting_for = f"another way to get version {version}"
        if not await self._news.until(found, NEWS_BEATS * self._news.beat_s) and tried.once_more():  # or is it that there is a newer one?
            return announcement
        limit_s = 0.0 if DISK in causes else self._config.timeout_s
        while not await self._news.until(found, limit_s, *request):
            if self._in_touch():
                raise tried.error()
            limit_s = self._config.timeout_s  # whoever published it is gone, perhaps; the next training job publishes another one
        self.waiting_for = ""
        newest = found()
        assert newest is not None
        if newest.version == version:
            return newest
        self._num_skipped += bool(causes)
        for message in request if self._num_skipped > 1 else []:  # not by chance: the trainer must hear of it, though a newer one is there
            await self._send(message)
        if self._num_skipped >= MAX_SKIPPED and DISK in causes:
            raise tried.error()
        raise WeightsSuperseded(f"it could not be had by {', '.join(causes)}, and {newest.version} is there")

    async def _from_storage(self, announcement: Announcement) -> Path:
        self.waiting_for = f"version {announcement.version} to be seen in {announcement.folder}"
        soon = time.monotonic() + self._config.timeout_s / 4  # storage may take longer to show a version than training to make the next
        return await from_shared_storage(announcement, self._config.timeout_s,
                                         lambda: time.monotonic() < soon or not self._is_old(announcement.version))

    async def _stream(self, announcement: Announcement) -> Path:
        version, streaming = announcement.version, self._streaming
        if streaming is None:
            raise WeightsError("this worker was not configured to stream weights (weights.transport)")
        streaming.expect(version)
        sources = await self._ask(version)
        failed, said = set[str](), set[str]()

        def note(endpoints: list[str]) -> None:
            failed.update(endpoints)
            self._news.tell()

        job = asyncio.create_task(streaming.fetch(announcement, sources, note))
        try:
            while not job.done():
                await self._news.or_end_of(job)
                if self._is_old(version) and not streaming.has_begun(version):
                    break
                if failed - said:
                    said |= failed
                    await self._send(SourcesRequest(version, sorted(failed)))
        finally:
            job.cancel()
            await asyncio.wait([job])
        if job.cancelled():
            raise WeightsSuperseded("a newer one is there, and nothing of this one has come")
        return job.result()

    async def _ask(self, version: Version) -> Sources:
        """Ask the coordinator whom to fetch from. Raises `WeightsSuperseded`."""
        self._sources = None
        self.waiting_for = f"the coordinator to say whom to fetch version {version} from"
        await self._news.until(lambda: self._is_old(version) or self._has_sources(version), self._config.timeout_s, SourcesRequest(version))
        self.waiting_for = ""
        if self._is_old(version):
            raise WeightsSuperseded("a newer one is there, and nothing of this one has come")
        if self._sources is None:
            print(f"the coordinator has not said whom to fetch version {version} from: the trainer's servers are asked", flush=True)
            return Sources(version, [])
        return self._sources

    def _has_sources(self, version: Version) -> bool:
        return self._sources is not None and self._sources.version == version

    # -- loading -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def permit(self, version: Version) -> AsyncIterator[None]:
        """The time of loading `version`, granted by the coordinator so that never all workers stand still at once (weights.rolling). It
        ends with the heartbeat that says that the version is held."""
        self._granted = None
        self.waiting_for = f"permission to load version {version} (weights.rolling)"
        limit_s = PERMIT_TIMEOUTS * self._config.timeout_s
        if not await self._news.until(lambda: self._granted == version, limit_s, LoadRequest(version)):
            print(f"the coordinator has not let this worker load version {version} in {limit_s:g} s: it loads all the same", flush=True)
        self.waiting_for = ""
        yield

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _is_old(self, version: Version) -> bool:
        return self._newest is not None and self._newest.version > version

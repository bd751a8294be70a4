"""Fetches one version of the weights into the node's store: from parents in the tree, at last from the trainer's servers.

    announcement --lock of the version--> manifest (digest?) --> allocate --> window of chunks asked of the best source left
        --> digest --> in its place in the store --> served on at once (cut-through) --> ... --> complete: renamed

Two kinds of threads: the caller's moves messages, the others check, decode and put in place. What a source is asked for comes from
the plan (fetch_plan.py), which also says what follows when one fails.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from workers.config.training import WeightsConfig
from workers.messages.parts import Announcement, Version
from workers.run.digests import digest_of
from workers.transport.weights.connections import Gone, Reply, WeightLinks
from workers.transport.weights.fetch_plan import FetchPlan, Request
from workers.transport.weights.messages import ALL, Content, Unavailable, WeightKeys
from workers.weights.manifest import MANIFEST, SourcesFailed, WeightsError
from workers.weights.mmap import MappedFiles
from workers.weights.partial_version import CorruptChunk, Incoming
from workers.weights.store import Cancelled, NodeStore

__all__ = ["Cancelled", "FetchProgress", "fetch"]

SILENT_TIMEOUTS = 2  # weights.timeout_s for which another process of the node may bring nothing: it tries several sources
WINDOW_BYTES = 32 << 20  # of a source, and at least two chunks a stream
MAX_THREADS = 16
TICK_MS = 100
REPORT_S = 0.2


@dataclass
class FetchProgress:
    """How far a fetch has come. `num_corrupt`: chunks that were not what was announced; `failures`: sources that were given up, and why."""

    size: int = 0  # bytes of the version
    arrived: int = 0  # bytes of it that are in their place,
    resumed: int = 0  # of them from an earlier fetch
    received: int = 0  # bytes that came over the network
    num_deltas: int = 0
    num_corrupt: int = 0
    source: str = ""  # that something came of last
    failures: list[str] = field(default_factory=list)


def fetch(announcement: Announcement, parents: Sequence[str], store: NodeStore, config: WeightsConfig, keys: WeightKeys, *,
          cancelled: threading.Event, report: Callable[[FetchProgress], None] | None = None,
          on_begin: Callable[[Incoming], None] | None = None) -> Path:
    """Bring the announced version to this node; returns the held folder, complete, every chunk checked by digest. Blocks: run it in a thread.

    `parents`: endpoints to ask before `announcement.sources`, best first; each has asked for the version before us, or has it. `on_begin` is
    told what arrives, to serve it on (`WeightServer.offer_incoming`). `report` is called a few times a second. Raises `SourcesFailed` naming
    each source's failure when all have failed, `WeightsError` where it has no place here, and `Cancelled` soon after `cancelled` is set. What has
    arrived stays for another attempt, until `NodeStore.remove_older`. Where another process of this node fetches it, waits for that.
    """
    version = announcement.version
    while store.lock(version, SILENT_TIMEOUTS * config.timeout_s, cancelled):
        try:
            _Fetch(announcement, parents, store, config, keys, cancelled, report or (lambda _: None), on_begin or (lambda _: None)).run()
        finally:
            store.unlock(version)
    folder = store.held(version)
    if digest_of((folder / MANIFEST).read_bytes()) != announcement.digest:
        raise WeightsError(f"{folder}: the manifest is not the announced one. Remove the folder, if no other run uses it")
    return folder


class _Fetch:
    """One attempt, with the version's lock."""

    def __init__(self, announcement: Announcement, parents: Sequence[str], store: NodeStore, config: WeightsConfig, keys: WeightKeys,
                 cancelled: threading.Event, report: Callable[[FetchProgress], None], on_begin: Callable[[Incoming], None]) -> None:
        self._announcement, self._parents, self._store, self._config = announcement, list(dict.fromkeys(parents)), store, config
        self._cancelled, self._report, self._on_begin = cancelled, report, on_begin
        self._patience_s = config.timeout_s / 4  # before the next source is tried
        self._num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) - 1))
        self._checked: SimpleQueue[tuple[Request, bool, Future[None]]] = SimpleQueue()
        self._progress, self._reported = FetchProgress(), 0.0
        self._base: tuple[Version, MappedFiles] | None = self._find_base() if config.delta else None
        self._plan: FetchPlan
        self._incoming: Incoming
        self._links = WeightLinks(config, keys, announcement.version)

    def _find_base(self) -> tuple[Version, MappedFiles] | None:
        base = max((version for version in self._store.versions() if version < self._announcement.version), default=None)
        return (base, MappedFiles(self._store.held(base))) if base is not None and self._store.use(base) else None

    def run(self) -> None:
        """Fetch all of it. Raises `WeightsError`, `Cancelled`."""
        try:
            with ThreadPoolExecutor(self._num_threads, "weights") as pool:
                self._begin(self._fetch_manifest())
                self._fetch_chunks(pool)
            self._incoming.finish()
        finally:
            self._links.close()
            self._tell(now=True)

    # -- the manifest ----------------------------------------------------------------------------------------------------

    def _fetch_manifest(self) -> bytes:
        """The first that is the announced one. A parent that fails here is not asked for chunks either."""
        for endpoint in list(dict.fromkeys((*self._parents, *self._announcement.sources[:1]))):
            self._links.ask_manifest(endpoint)
            content, cause = self._await_manifest(endpoint)
            if not cause:
                return content
            self._links.drop(endpoint)
            self._parents = [parent for parent in self._parents if parent != endpoint]
            self._failed(f"{endpoint}: {cause}")
        raise self._error("no source has its manifest")

    def _await_manifest(self, endpoint: str) -> tuple[bytes, str]:
        """The manifest, or why there is none."""
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            self._check_wanted()
            events = self._links.poll(TICK_MS)
            if gone := next((event for event in events if isinstance(event, Gone)), None):  # there is no other connection yet
                return b"", gone.cause
            for event in events:
                assert not isinstance(event, Gone)
                if isinstance(event.message, Unavailable):
                    return b"", event.message.reason
                if event.message.number == ALL:
                    content = bytes(event.content)
                    wrong = digest_of(content) != self._announcement.digest
                    return content, "sent a manifest that is not the announced one" if wrong else ""
        return b"", f"silent for {self._patience_s:g} s"

    def _begin(self, manifest: bytes) -> None:
        self._incoming = self._store.begin(manifest, self._announcement.version, self._num_threads)
        missing = self._incoming.missing()
        self._progress.size = self._incoming.manifest.size
        self._progress.arrived = self._progress.resumed = self._progress.size - sum(chunk.size for chunk in missing)
        window = max(2 * self._config.streams, WINDOW_BYTES // self._incoming.manifest.chunk_bytes)
        self._plan = FetchPlan(missing, self._parents, self._announcement.sources, window=window, patience_s=self._patience_s,
                               delta=self._base is not None)
        self._on_begin(self._incoming)

    # -- the chunks ------------------------------------------------------------------------------------------------------

    def _fetch_chunks(self, pool: ThreadPoolExecutor) -> None:
        plan = self._plan
        while not plan.done:
            self._check_wanted()
            for request in plan.requests(time.monotonic()):
                chunk, base = request.chunk, self._base[0] if self._base and request.delta else None
                self._links.ask_chunk(request.source, chunk.number, chunk.name, chunk.offset, chunk.size, base)
            if plan.stuck:
                raise self._error(f"no source is left for chunk {plan.stuck[0].index} of {plan.stuck[0].name}")
            for event in self._links.poll(TICK_MS):
                self._take(event, pool)
            while not self._checked.empty():
                self._settle(*self._checked.get())
            for endpoint in plan.overdue(time.monotonic()):
                self._lost(endpoint, f"silent for {self._patience_s:g} s")
            self._tell()

    def _take(self, event: Reply | Gone, pool: ThreadPoolExecutor) -> None:
        if isinstance(event, Gone):
            self._lost(event.endpoint, event.cause)
        elif isinstance(event.message, Content):
            request = self._plan.received(event.endpoint, event.message.number, time.monotonic())
            if request is not None:
                self._progress.received += len(event.content)
                self._progress.source = event.endpoint
                self._check_later(pool, request, event.message.delta, event.content)
        elif event.message.number == ALL:
            self._lost(event.endpoint, event.message.reason)
        else:
            self._plan.unavailable(event.endpoint, event.message.number)

    def _check_later(self, pool: ThreadPoolExecutor, request: Request, delta: bool, content: memoryview) -> None:
        def done(future: Future[None]) -> None:
            self._checked.put((request, delta, future))
            self._links.wake()

        pool.submit(self._check, request, delta, content).add_done_callback(done)

    def _check(self, request: Request, delta: bool, content: memoryview) -> None:
        if not delta:
            self._incoming.write(request.chunk, content)
        elif self._base:
            self._incoming.write_delta(request.chunk, content, self._base[1], self._base[0])
        else:
            raise CorruptChunk(f"{request.chunk.name}: a difference came for chunk {request.chunk.index}, which nobody asked for")

    def _settle(self, request: Request, delta: bool, future: Future[None]) -> None:
        try:
            future.result()
        except CorruptChunk as error:
            self._progress.num_corrupt += 1
            print(f"warning: from {request.source}: {error}. It is asked for again elsewhere", flush=True)
            if self._plan.corrupt(request.source, request.chunk.number, delta and request.delta):
                self._links.drop(request.source)
                self._failed(f"{request.source}: sends what was not announced")
            return
        self._plan.verified(request.source, request.chunk.number)
        self._progress.arrived += request.chunk.size
        self._progress.num_deltas += delta

    # -- what is said ----------------------------------------------------------------------------------------------------

    def _lost(self, endpoint: str, cause: str) -> None:
        self._links.drop(endpoint)
        if self._plan.lost(endpoint):
            self._failed(f"{endpoint}: {cause}")

    def _failed(self, failure: str) -> None:
        self._progress.failures.append(failure)
        print(f"warning: version {self._announcement.version} is asked for elsewhere. {failure}", flush=True)

    def _check_wanted(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled(f"version {self._announcement.version} is not wanted any more")

    def _error(self, what: str) -> SourcesFailed:
        causes = "; ".join(self._progress.failures) or "No source was named"
        return SourcesFailed(f"version {self._announcement.version} cannot be fetched: {what}. {causes}")

    def _tell(self, now: bool = False) -> None:
        if now or time.monotonic() - self._reported > REPORT_S:
            self._reported = time.monotonic()
            self._report(dataclasses.replace(self._progress, failures=list(self._progress.failures)))

"""What every training rank does to publish a version: its part of the files, digests, and serving them to the rollout workers.

    all ranks          gather over tensor parallelism -> copy into files in the node's memory           training stands still for this
    a thread of each   chunk digests (and differences to the version before) -> part -> rank 0          training goes on
    rank 0's thread    parts of all ranks -> manifest -> announced (announcer.py)
    another thread     serves the files' chunks (transport/weights/server.py)

A rank publishes what no rank of an earlier copy holds too (content.py): the first tensor-parallel rank of each pipeline stage and group of experts.
What goes wrong on any rank is in its part: then rank 0 announces nothing, and fails.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from workers.config import Config, Transport
from workers.messages.parts import Version
from workers.run.folder import RunFolder
from workers.trainer.background import LEAVE_S, Background
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.parallel.mailbox import Mailbox
from workers.trainer.orders import PublishWeights, ShareWeights
from workers.trainer.weights.content import content_of
from workers.trainer.weights.shared_copies import SharedCopies
from workers.transport.weights.messages import WeightKeys
from workers.transport.weights.server import ServerCounters, WeightServer
from workers.weights.locations import places
from workers.weights.manifest import FileEntry, Manifest, WeightsError, write_manifest
from workers.weights.publisher import Publisher
from workers.weights.store import NodeStore, open_store

START_S = 120.0
PART_S = 600.0
GPU_THREADS = 4
"""Where GPUs train, so many threads make digests; where CPUs do, one takes little from them."""


class Part(msgspec.Struct, frozen=True):
    """What a rank tells rank 0 of a version: its files, or its `problem`; what its server has sent, and how many it has refused, since it
    started; the size of the differences; why its files do not lie on shared storage, where they should."""

    files: list[FileEntry] = []
    sent_bytes: int = 0
    num_refused: int = 0
    delta_bytes: int = 0
    problem: str = ""
    unshared: str = ""


class Served(msgspec.Struct, frozen=True):
    """Where a rank serves its files."""

    source: int | None
    endpoint: str


Then = Callable[[list[Part]], None]


def _nothing(parts: list[Part]) -> None:
    pass


class RankPublisher:
    """This rank's part in publishing; all ranks make it, and call `publish` and `share`, together. `ended` is called, in a thread, after the
    work of a version has ended on this rank. `endpoints`: on rank 0 those of all sources, in order. `copied_at`: when training went on the last
    time (monotonic clock)."""

    def __init__(self, run: RunFolder, config: Config, engine: MegatronEngine, epoch: int, ended: Callable[[], None] = lambda: None) -> None:
        self._config, self._epoch = config, epoch
        self._chunk_bytes, self._threads = config.weights.chunk_mb << 20, GPU_THREADS if torch.cuda.is_available() else 1
        self.places = places(run, config)
        self.working = Background("publish", ended)
        self.serves = config.weights.transport is not Transport.disk
        self._part_s = PART_S + (0.0 if self.serves else run.patience_s)
        self._shared = SharedCopies(run, self.places.shared, epoch, only_way=not self.serves)
        self._own: Publisher | None = None
        self._store: NodeStore | None = None
        self._server: WeightServer | None = None
        self._delta: Path | None = None
        self.copied_at = 0.0
        self._content = content_of(config, engine)
        if self._content.source is not None:
            self._open(run, self._content.source)
        self.endpoints = self._meet(self._content.source)

    def _open(self, run: RunFolder, source: int) -> None:
        self._store = open_store(self.places.store)
        self._own = Publisher(self._store, source, self._content.files, self._content.small, self._content.dtype)
        self._own.remove_earlier(self._epoch)
        if self.serves:
            try:
                self._server = WeightServer(self._config.transport, self._config.weights, WeightKeys.read(run))
            except BaseException:
                self._store.leave()
                raise

    def _meet(self, source: int | None) -> list[str]:
        mailbox = Mailbox()
        mailbox.post(msgspec.msgpack.encode(Served(source, self._server.endpoint if self._server else "")))
        if process_group.rank():
            return []
        served = [msgspec.msgpack.decode(content, type=Served) for content in mailbox.collect(START_S)]
        by_source = {one.source: one.endpoint for one in served if one.source is not None}
        return [by_source[number] for number in range(len(by_source))] if self.serves else []

    def publish(self, order: PublishWeights, then: Then = _nothing) -> None:
        """Copy the weights, and return; the rest goes on in a thread, which on rank 0 calls `then` with all ranks' parts.

        Raises, on rank 0, what prevents the copy there; other ranks tell it.
        """
        self.working.end()
        mailbox, problem = Mailbox(), ""
        try:
            self._copy(order)
        except WeightsError as error:
            if process_group.rank() == 0:
                raise
            problem = str(error)
        self.copied_at = time.monotonic()
        self.working.start(lambda: self._finish(order, problem, mailbox, then))

    def share(self, order: ShareWeights, then: Then = _nothing) -> None:
        """Copy a version to shared storage, in a thread, which on rank 0 calls `then`."""
        self.working.end()
        mailbox = Mailbox()

        def work() -> Part:
            return Part(unshared=self._shared.copy(self._own, order.version))

        self.working.start(lambda: self._exchange(work, mailbox, then))

    def offer(self, version: Version, manifest: Manifest) -> str:
        """On rank 0: all parts are there; serve the manifest, too. Returns the folder where workers of this machine can read them, '' if there
        is none."""
        assert self._own is not None
        folder = self._own.folder(version)
        if self._server is not None:
            self._server.offer(version, folder, manifest.encode(), self._delta)
        if self.places.shared is not None:
            return ""
        write_manifest(folder, manifest)
        return str(folder)

    def complete_shared(self, manifest: Manifest, parts: list[Part]) -> str:
        """On rank 0: all ranks have copied their files to shared storage, or could not; returns the folder there, '' where there is none."""
        return self._shared.complete(manifest, [part.unshared for part in parts])

    def close(self) -> None:
        """Serve nothing more, and remove what this rank has published. Waits a moment for what goes on beside training; raises nothing of it."""
        self.working.abandon(LEAVE_S)
        if self._server is not None:
            self._server.close()
        if self._own is not None and self._store is not None:
            self._own.remove_all()
            self._store.leave()
        self._own = self._store = self._server = None

    # -- training stands still -----------------------------------------------------------------------------------------

    def _copy(self, order: PublishWeights) -> None:
        tensors = self._content.tensors()
        try:
            if self._own is not None:
                self._prepare(self._own, order)
                self._own.fill(tensors, order.version)
        finally:
            for _ in tensors:  # other ranks wait for this one's shares
                pass

    def _prepare(self, own: Publisher, order: PublishWeights) -> None:
        """Make the files of a version; where there is no room, at the cost of the oldest ones, though some worker that is slow fetches them."""
        while True:
            try:
                own.prepare(order.version)
                return
            except WeightsError:
                if not self._withdraw(own.remove_older(order.needed) or own.remove_oldest()):
                    raise

    def _withdraw(self, removed: list[Version]) -> bool:
        if self._server is not None:
            for version in removed:
                self._server.withdraw(version)
        return bool(removed)

    # -- beside training -----------------------------------------------------------------------------------------------

    def _finish(self, order: PublishWeights, problem: str, mailbox: Mailbox, then: Then) -> None:
        def work() -> Part:
            if problem:
                raise WeightsError(problem)
            return self._make_part(order)

        self._exchange(work, mailbox, then)
        if self._own is not None:
            self._make_room(self._own, order)

    def _exchange(self, work: Callable[[], Part], mailbox: Mailbox, then: Then) -> None:
        rank = process_group.rank()
        try:
            part = work()
        except (WeightsError, OSError) as error:
            part = Part(problem=f"training rank {rank} on {socket.gethostname()}: {error}")
        mailbox.post(msgspec.msgpack.encode(part))
        if rank == 0:
            parts = [msgspec.msgpack.decode(content, type=Part) for content in mailbox.collect(self._part_s)]
            if problems := [part.problem for part in parts if part.problem]:
                raise WeightsError("weights cannot be published. " + "; ".join(problems))
            then(parts)

    def _make_part(self, order: PublishWeights) -> Part:
        if self._own is None:
            return Part()
        version, delta_bytes = order.version, 0
        files = self._own.describe(version, self._chunk_bytes, self._threads)
        self._delta = None
        if self._config.weights.delta and self._server is not None:
            try:
                deltas = self._own.make_deltas(version, self._chunk_bytes, self._threads)
            except (WeightsError, OSError) as error:
                print(f"warning: version {version} is served without differences: {error}", flush=True)
            else:
                if deltas is not None:
                    self._delta, delta_bytes = deltas[0], deltas[1].encoded
        if self._server is not None and process_group.rank():
            self._server.offer(version, self._own.folder(version), None, self._delta)
        unshared = self._shared.copy(self._own, version) if order.shared else ""
        counters = self._server.counters if self._server is not None else ServerCounters()
        return Part(files, counters.bytes_sent, counters.num_refused, delta_bytes, unshared=unshared)

    def _make_room(self, own: Publisher, order: PublishWeights) -> None:
        """Remove what nobody needs any more, and make the files of the next version."""
        if self.places.shared is not None and not self.serves:
            own.remove(order.version)  # it is on shared storage by now
        self._withdraw(own.remove_older(order.needed))
        if order.shared and process_group.rank() == 0:
            self._shared.remove_older(order.version, order.needed)
        if order.version.step < self._config.run.num_steps:
            with contextlib.suppress(WeightsError):  # said when it is needed, if it is so then
                own.prepare(Version(order.version.epoch, order.version.step + 1))

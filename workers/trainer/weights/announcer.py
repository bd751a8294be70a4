"""Rank 0's side of publishing: one version after the other, announced when all of it is there.

    publish: the version before is announced? -> epoch? -> all ranks copy their parts (rank_publisher.py)            training stands still
             weights.transport=nccl: broadcast, where a group is ready (broadcast.py)
    a thread: parts of all ranks -> manifest -> offered -> epoch? -> StepFinished (announcement, metrics)        training goes on
    a worker cannot get weights by zmq -> FallbackWanted -> from then on on shared storage too, the present version at once -> Republished

One version is on its way at a time: the next one waits for it, and so does whoever needs the coordinator at the same step as the trainer
(checkpoints, exports, drains). It is announced when it has been broadcast, so that nobody begins to fetch what is just coming. What fails in
the thread is raised where its end is waited for or looked at.
"""

from __future__ import annotations

import threading
import time
from functools import partial

import msgspec

from workers.config import Config, Transport
from workers.messages.from_worker import Republished
from workers.messages.parts import Announcement, Version
from workers.run.checkpoints import check_epoch
from workers.run.digests import digest_of
from workers.run.folder import RunFolder
from workers.trainer.background import LEAVE_S
from workers.trainer.coordinator_link.client import CoordinatorLink
from workers.trainer.orders import PublishWeights, ShareWeights
from workers.trainer.ranks import IDLE_S, Ranks
from workers.trainer.weights.broadcast import WeightGroup
from workers.trainer.weights.rank_publisher import Part, RankPublisher
from workers.weights.manifest import Manifest

NOTHING_NEEDED = Version(0, 0)


class Announcer:
    """`publisher` is rank 0's own; `link.wake` must be what it calls at the end of its work. `group`: by which weights are broadcast, too."""

    def __init__(self, run: RunFolder, config: Config, link: CoordinatorLink, ranks: Ranks, publisher: RankPublisher,
                 group: WeightGroup | None = None) -> None:
        self._run, self._config, self._link, self._ranks, self._publisher = run, config, link, ranks, publisher
        self._group = group
        self._chunk_bytes = config.weights.chunk_mb << 20
        self._shared = config.weights.transport is Transport.disk
        self._last: tuple[Manifest, Announcement, str] | None = None
        self._sent_bytes = 0

    def publish(self, version: Version, metrics: dict[str, float]) -> None:
        """Publish the present weights as `version`; `metrics` go with it. Raises `Fenced`, `WeightsError`."""
        started = time.monotonic()
        self.wait()
        check_epoch(self._run, version, "version", self._ranks.keep_waiting)
        self._shared = self._shared or self._fallback_wanted()
        order = PublishWeights(version, self._link.needed or NOTHING_NEEDED, self._shared)
        self._ranks.tell(order)
        settled = threading.Event()
        self._publisher.publish(order, partial(self._announce, order, metrics, started, settled))
        try:
            if self._group is not None:
                metrics |= self._group.broadcast(version)
        finally:
            settled.set()

    def wait(self) -> None:
        """Wait until the version on its way is announced. Raises what has prevented that."""
        while not self._publisher.working.end(IDLE_S):
            self._ranks.keep_waiting()

    def attend(self) -> None:
        """While training waits: offer the last version in another way if that is wanted. Raises what has failed."""
        if self._publisher.working.end(0) and self._last is not None and not self._shared and self._fallback_wanted():
            self._shared = True
            manifest, announcement, folder = self._last
            if folder:
                self._republish(manifest, announcement, folder)
                return
            order = ShareWeights(announcement.version)
            self._ranks.tell(order)
            self._publisher.share(order, lambda parts: self._republish(manifest, announcement, self._publisher.complete_shared(manifest, parts)))

    def close(self) -> None:
        """Nothing is published any more."""
        if self._group is not None:
            self._group.close(wait_s=LEAVE_S)
        self._publisher.close()

    # -- beside training -----------------------------------------------------------------------------------------------

    def _announce(self, order: PublishWeights, metrics: dict[str, float], started: float, settled: threading.Event,
                  parts: list[Part]) -> None:
        manifest = Manifest(order.version, self._chunk_bytes, [entry for part in parts for entry in part.files])
        check_epoch(self._run, order.version, "version")
        folder = self._publisher.offer(order.version, manifest)
        if order.shared:
            folder = folder or self._publisher.complete_shared(manifest, parts)
        announcement = Announcement(order.version, folder if order.shared else "", digest_of(manifest.encode()), self._publisher.endpoints)
        self._last = manifest, announcement, folder
        sent, copied_at = sum(part.sent_bytes for part in parts), self._publisher.copied_at
        metrics |= {"publish_s": copied_at - started, "publish_background_s": time.monotonic() - copied_at,
                    "weights_bytes": manifest.size, "weights_sent_bytes": sent - self._sent_bytes,
                    "weights_refused": sum(part.num_refused for part in parts)}
        if self._config.weights.delta:
            metrics["weights_delta_bytes"] = sum(part.delta_bytes for part in parts)
        self._sent_bytes = sent
        settled.wait()
        self._link.step_finished(announcement, metrics)

    def _republish(self, manifest: Manifest, announcement: Announcement, folder: str) -> None:
        if not folder:
            return  # it could not be copied, which has been said: those that follow may be
        check_epoch(self._run, announcement.version, "version")
        announcement = msgspec.structs.replace(announcement, folder=folder)
        self._last = manifest, announcement, folder
        print(f"version {announcement.version} lies in {folder} too, and so will those that follow", flush=True)
        self._link.say(Republished(announcement))

    def _fallback_wanted(self) -> bool:
        cause = self._link.fallbacks.get(Transport.zmq.value)
        if cause is not None and not self._shared:
            print(f"weights by zmq have failed: {cause}. They are offered as files too from now on", flush=True)
        return cause is not None

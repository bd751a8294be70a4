"""New weights on their way from the trainer to the workers' engines. Pure; core.py asks it and sends what it returns.

    SourcesRequest   -> fanout_tree.py: the tree          -> Sources
    LoadRequest      -> load_permits.py: who may load           -> LoadGranted
    TransportFailed  -> once for each transport            -> FallbackWanted, to the trainer -> Republished
    Heartbeat (held), loss, deadlines                      -> places and permits are free for others
"""

from __future__ import annotations

from workers.config import WeightsConfig
from workers.coordinator.registered_worker import Worker
from workers.coordinator.weights.fanout_tree import Distribution
from workers.coordinator.weights.load_permits import LoadPermits
from workers.coordinator.worker_registry import Registry
from workers.messages.from_coordinator import FallbackWanted, LoadGranted, Sources
from workers.messages.from_worker import LoadRequest, SourcesRequest, TransportFailed
from workers.messages.parts import Announcement, Message, Role

LAST_RESORT = "disk"
"""Behind this transport there is no other."""


class Delivery:
    """What the coordinator does so that weights arrive. `fallbacks`: for each transport that has failed, the first cause; `notices`: lines for
    the coordinator's log, taken out by whoever writes it."""

    def __init__(self, config: WeightsConfig, registry: Registry) -> None:
        self._registry = registry
        self._limit_s = config.timeout_s
        self.distribution = Distribution(config.fanout)
        self.permits = LoadPermits(config.rolling, config.timeout_s)
        self.fallbacks: dict[str, str] = {}
        self.notices: list[str] = []

    def announced(self, announcement: Announcement) -> None:
        """There is a new version, or more ways to one."""
        self.distribution.announced(announcement.version)

    def take(self, worker: Worker, message: SourcesRequest | LoadRequest | TransportFailed, now: float) -> list[tuple[bytes | None, Message]]:
        """A rollout worker's word about a version; returns the answers."""
        match message:
            case SourcesRequest():
                if message.failed:
                    self.notices.append(f"{worker.name}: version {message.version} could not be had from {', '.join(message.failed)}")
                place = self.distribution.ask(message.version, worker.peer, worker.host, worker.serves, message.failed)
                return [(worker.peer, Sources(message.version, place.endpoints, place.leads))]
            case LoadRequest():
                self.distribution.fetched(message.version, worker.peer)
                return [(peer, LoadGranted(version)) for peer, version in self.permits.ask(worker.peer, message.version, worker.ready, now)]
            case TransportFailed():
                return self._failed(worker, message)

    def beat(self, worker: Worker) -> None:
        """A worker's heartbeat has been noted in the registry."""
        if worker.held is not None:
            self.distribution.holds(worker.held, worker.peer)
            self.permits.held(worker.peer, worker.held)
        else:
            self.permits.stands_still(worker.peer)

    def lost(self, worker: Worker) -> None:
        """A worker is gone."""
        self.distribution.lost(worker.peer)
        self.permits.lost(worker.peer)

    def expire(self, now: float) -> None:
        """End the permits whose time is over. To be called now and then."""
        for peer in self.permits.expire(now):
            name = self._registry.workers[peer].name
            self.notices.append(f"{name} has not loaded its version in {self._limit_s:g} s (weights.timeout_s); others may load now")

    def grant(self, now: float) -> list[tuple[bytes | None, Message]]:
        """LoadGranted to whoever may load from now on."""
        return [(peer, LoadGranted(version)) for peer, version in self.permits.grant(self._registry.num_ready, now)]

    def wanted(self, trainer: bytes) -> list[tuple[bytes | None, Message]]:
        """What a trainer that registers (again) has to know."""
        return [(trainer, FallbackWanted(transport, cause)) for transport, cause in self.fallbacks.items()]

    def _failed(self, worker: Worker, message: TransportFailed) -> list[tuple[bytes | None, Message]]:
        if message.transport in self.fallbacks:
            return []
        self.fallbacks[message.transport] = f"{worker.name} on {worker.host}: {message.cause}"
        self.notices.append(f"weights by {message.transport} have failed. {self.fallbacks[message.transport]}"
                            + ("" if message.transport == LAST_RESORT else ". The trainer is asked to offer them in the next way too"))
        if message.transport == LAST_RESORT:
            return []
        return [(trainer.peer, FallbackWanted(message.transport, self.fallbacks[message.transport]))
                for trainer in self._registry.of(Role.trainer)]

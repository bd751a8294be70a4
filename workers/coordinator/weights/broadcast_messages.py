"""Between the messages about broadcasts of weights and the group that decides about them (broadcast_group.py). Pure."""

from __future__ import annotations

from collections.abc import Mapping

from workers.coordinator.registered_worker import Worker
from workers.coordinator.weights.broadcast_group import Sending, UpdateGroup
from workers.coordinator.worker_registry import Registry
from workers.messages.broadcasts import (
    BroadcastReady,
    BroadcastWanted,
    UpdateGroupBroken,
    UpdateGroupJoined,
    UpdateGroupOpened,
)
from workers.messages.parts import Role, Version

FromTrainer = UpdateGroupOpened | BroadcastWanted
FromMember = UpdateGroupJoined | UpdateGroupBroken | BroadcastReady


class Broadcasts:
    """The update group of one coordinator among its workers (`registry`); every method returns what is to be sent."""

    def __init__(self, epoch: int, registry: Registry) -> None:
        self.group = UpdateGroup(epoch)
        self._registry = registry

    def take(self, worker: Worker, message: FromTrainer | FromMember, now: float) -> Sending:
        """A word of the trainer's, or of a worker in the group."""
        match message:
            case UpdateGroupOpened():
                return self.group.opened(message)
            case BroadcastWanted():
                return self.group.wanted(worker.peer, message.version, self._fleet(), now)
            case UpdateGroupJoined():
                return self.group.joined(worker.peer, message.group)
            case UpdateGroupBroken():
                return self.group.broken(worker.peer, worker.name, message.group, message.cause)
            case BroadcastReady():
                return self.group.ready(worker.peer, message)

    def announced(self, now: float) -> None:
        """There is a new version."""
        self.group.announced(now)

    def lost(self, worker: Worker) -> Sending:
        """A worker is gone."""
        return self.group.lost(worker.peer, worker.name)

    def expire(self, now: float) -> Sending:
        """Give up what has taken too long."""
        return self.group.expire({peer: worker.name for peer, worker in self._registry.workers.items()}, now)

    def consider(self, newest: Version, now: float) -> Sending:
        """Make another group where that is due; `newest`: the version announced last."""
        workers = [worker for worker in self._registry.of(Role.rollout) if not worker.draining]
        current = [worker for worker in workers if worker.held is not None and worker.held >= newest]
        fleet = {worker.peer: worker.update_ranks for worker in current if worker.update_ranks}
        return [sent for trainer in self._registry.of(Role.trainer)
                for sent in self.group.consider(trainer.peer, fleet, len(current) == len(workers), now)]

    def _fleet(self) -> Mapping[bytes, int]:
        return {worker.peer: worker.update_ranks for worker in self._registry.ready() if worker.update_ranks}

"""The process group through which new weights are broadcast (weights.transport=nccl): who is in it, and when a broadcast may begin. Pure.

    none --a version, a fleet--> opening --the trainer listens--> joining --all are in--> standing
      ^                                                                                     |   ^
      |                                                             trainer: BroadcastWanted|   |all of them stand still: Broadcast
      |                                                                                     v   |
      +------ a member is lost | says that it is broken | leaves | comes too late ------- preparing

The trainer is rank 0; every rollout worker that generates brings the ranks of its servers. A group cannot change: where the fleet has, it
is given up for another, at most once a version, when the workers have loaded that: servers do nothing else while they join. The version
that finds no group standing comes by zmq, which is offered beside it, and so it comes to whoever is not in the group.

Whoever has kept a group from standing is left out for the next 1, 3, 7, ... versions, so that one that cannot be reached does not keep the
others from it. Where it is not clear who has, because nobody is in before all are, or those who suffer tell of it first, only from the
second time on.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from workers.messages.broadcasts import (
    Broadcast,
    BroadcastReady,
    BroadcastRefused,
    JoinUpdateGroup,
    LeaveUpdateGroup,
    OpenUpdateGroup,
    PrepareBroadcast,
    UpdateGroupOpened,
)
from workers.messages.parts import Message, Version

Sending = list[tuple[bytes | None, Message]]

SETTLE_S = 30.0
"""So long after a version the workers that have not loaded it are waited for before another group is made."""
JOIN_S = 30.0
"""So long making a group may take; the servers that wait for the last one generate nothing."""
PREPARE_S = 10.0
"""So long the trainer stands still at most for all servers to do so."""
LONGEST = 6


class Phase(enum.Enum):
    """Where a group is."""

    none = "none"
    opening = "opening"
    joining = "joining"
    standing = "standing"
    preparing = "preparing"


@dataclass
class Members:
    """Who is in a group: ranks by worker, in the order of their ranks, behind the trainer's; `waiting`: whose word is still to come."""

    trainer: bytes
    ranks: dict[bytes, int]
    waiting: set[bytes] = field(default_factory=set)

    @property
    def num_ranks(self) -> int:
        """All ranks, the trainer's among them."""
        return 1 + sum(self.ranks.values())

    @property
    def all(self) -> list[bytes]:
        """The trainer and the workers."""
        return [self.trainer, *self.ranks]


class Absences:
    """Who is left out of groups, for how many more versions."""

    def __init__(self) -> None:
        self._failures: dict[bytes, int] = {}
        self._left: dict[bytes, int] = {}

    def blame(self, peers: Iterable[bytes], surely: bool) -> None:
        """They have made a group fail, or seem to have."""
        for peer in sorted(peers):  # of a set: the same order in every process
            self._failures[peer] = min(self._failures.get(peer, 0) + 1, LONGEST)
            self._left[peer] = 2 ** (self._failures[peer] - (not surely)) - 1

    def forgive(self, peers: Iterable[bytes]) -> None:
        """A broadcast to them has gone well."""
        for peer in peers:
            self._failures.pop(peer, None)

    def out(self) -> set[bytes]:
        """Who is left out for this version."""
        out = {peer for peer, left in self._left.items() if left > 0}
        self._left = {peer: left - 1 for peer, left in self._left.items() if left > 1}
        return out


class UpdateGroup:
    """The groups of one coordinator. Every method returns what is to be sent. `fleet`: the workers that could be in a group now, and how many
    ranks they would bring. `notices`: lines for the coordinator's log, taken out by whoever writes it; `cause`: why there was no group last; `sent`:
    the version that was broadcast last."""

    def __init__(self, epoch: int) -> None:
        self.phase = Phase.none
        self.group = ""
        self.members = Members(b"", {})
        self.notices: list[str] = []
        self.cause = "there has been none yet"
        self._epoch, self._number = epoch, 0
        self._absences = Absences()
        self._version = self.sent = Version(0, 0)
        self._has_broadcast = False
        self._due_at: float | None = None
        self._until = 0.0

    # -- making one ----------------------------------------------------------------------------------------------------

    def announced(self, now: float) -> None:
        """A version has been announced: look at the fleet when it has loaded that."""
        if self._due_at is None:
            self._due_at = now + SETTLE_S

    def consider(self, trainer: bytes, fleet: Mapping[bytes, int], settled: bool, now: float) -> Sending:
        """Make a group if that is due, and there is none of this fleet. `settled`: all workers hold the newest version."""
        due = self._due_at is not None and (settled or now >= self._due_at)
        if not due or not fleet or self.phase not in (Phase.none, Phase.standing):
            return []
        self._due_at, out = None, self._absences.out()
        wanted = {} if trainer in out else {peer: ranks for peer, ranks in fleet.items() if peer not in out}
        if not wanted or (self.phase is Phase.standing and wanted == self.members.ranks):
            return []
        sending = self._give_up("another one is made of the fleet as it is now") if self.phase is Phase.standing else []
        self._number += 1
        self.group, self.members = f"weights-{self._epoch}-{self._number}", Members(trainer, wanted, {trainer})
        self.phase, self._until, self._has_broadcast = Phase.opening, now + JOIN_S, False
        return [*sending, (trainer, OpenUpdateGroup(self.group, self.members.num_ranks))]

    def opened(self, message: UpdateGroupOpened) -> Sending:
        """The trainer says where to join."""
        if self.phase is not Phase.opening or message.group != self.group:
            return []
        self.phase, self.members.waiting = Phase.joining, set(self.members.all)
        sending, first = Sending(), 1
        for peer, ranks in self.members.ranks.items():
            sending.append((peer, JoinUpdateGroup(self.group, message.address, message.port, message.backend, message.buckets, first,
                                                  self.members.num_ranks, message.library)))
            first += ranks
        return sending

    def joined(self, peer: bytes, group: str) -> Sending:
        """One of them is in it."""
        if self.phase is Phase.joining and group == self.group:
            self.members.waiting.discard(peer)
            if not self.members.waiting:
                self.phase = Phase.standing
                self.notices.append(f"new weights go to {len(self.members.ranks)} workers by broadcast from now on (group {self.group}, "
                                    f"{self.members.num_ranks} ranks)")
        return []

    # -- broadcasts ----------------------------------------------------------------------------------------------------

    def wanted(self, trainer: bytes, version: Version, fleet: Mapping[bytes, int], now: float) -> Sending:
        """The trainer stands still with `version`."""
        if self.phase is Phase.standing and (missing := [peer for peer, ranks in self.members.ranks.items() if fleet.get(peer) != ranks]):
            return [(trainer, BroadcastRefused(version, "members of the group have stopped generating")),
                    *self._give_up(f"{len(missing)} of its workers do not generate")]
        if self.phase is not Phase.standing:
            why = f"there is no group: {self.cause}" if self.phase is Phase.none else "a group is being made"
            return [(trainer, BroadcastRefused(version, why))]
        if self._has_broadcast:
            self._absences.forgive(self.members.all)
        self._due_at = None  # until `version` is announced: nobody is taken in while it is broadcast
        self.phase, self._version, self._until = Phase.preparing, version, now + PREPARE_S
        self.members.waiting = set(self.members.ranks)
        return [(peer, PrepareBroadcast(self.group, version)) for peer in self.members.ranks]

    def ready(self, peer: bytes, message: BroadcastReady) -> Sending:
        """The servers of a worker stand still."""
        if self.phase is not Phase.preparing or (message.group, message.version) != (self.group, self._version):
            return [(peer, BroadcastRefused(message.version, "it came too late"))]
        self.members.waiting.discard(peer)
        if self.members.waiting:
            return []
        self.phase, self._has_broadcast, self.sent = Phase.standing, True, message.version
        return [(member, Broadcast(self.group, message.version)) for member in self.members.all]

    # -- the end of one ------------------------------------------------------------------------------------------------

    def broken(self, peer: bytes, name: str, group: str, cause: str) -> Sending:
        """`peer`, called `name`, says that a group is of no use any more."""
        if self.phase is Phase.none or group != self.group or peer not in self.members.all:
            return []
        if self.phase is Phase.joining and peer == self.members.trainer:
            self._blame_late()
        else:
            self._absences.blame([peer], surely=self.phase is not Phase.standing)
        return self._give_up(f"{name}: {cause}")

    def lost(self, peer: bytes, name: str) -> Sending:
        """A worker is gone."""
        return self._give_up(f"{name} was lost") if self.phase is not Phase.none and peer in self.members.all else []

    def expire(self, names: Mapping[bytes, str], now: float) -> Sending:
        """Give up what has taken too long."""
        if self.phase in (Phase.none, Phase.standing) or now <= self._until:
            return []
        late = [names.get(peer, "a worker that is gone") for peer in self.members.all if peer in self.members.waiting]
        self._blame_late()
        if self.phase is Phase.preparing:
            return self._give_up(f"{', '.join(late)}: servers were not interrupted in {PREPARE_S:g} s")
        return self._give_up(f"{', '.join(late)}: not in the group after {JOIN_S:g} s")

    def excuse(self, pause_s: float) -> None:
        """The coordinator did not run for so long until now: what has come meanwhile waits to be read."""
        self._until += pause_s

    def _blame_late(self) -> None:
        """Those whose word is missing; in a group that nobody is in before all are, that says little."""
        late, joining = self.members.waiting, self.phase is Phase.joining
        self._absences.blame(late - {self.members.trainer} if joining else late, surely=not joining or len(late) < len(self.members.all))

    def _give_up(self, cause: str) -> Sending:
        waiting = self.members.all if self.phase is Phase.preparing else []
        self.notices.append(f"the group {self.group} for broadcasting weights is given up: {cause}")
        self.phase, self.cause = Phase.none, cause
        return [*((peer, BroadcastRefused(self._version, cause)) for peer in waiting),
                *((peer, LeaveUpdateGroup(self.group, cause)) for peer in self.members.all)]

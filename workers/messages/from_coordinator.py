"""What the coordinator says to workers, as plain typed structs. A new message stands here and in `FromCoordinator`, and nowhere else.

    to every worker        Welcome  Refused  HeartbeatReply  Drain  Suspended  Finish
    to a rollout worker    Leases  Acknowledged  RewardElements  Sources  LoadGranted
                           JoinUpdateGroup  LeaveUpdateGroup  PrepareBroadcast  Broadcast  BroadcastRefused  (broadcasts.py)
    to the trainer         Batch  VersionsNeeded  FallbackWanted  CheckpointPart
                           OpenUpdateGroup  LeaveUpdateGroup  Broadcast  BroadcastRefused      (broadcasts.py)
    to all                 VersionAnnounced (published; repeated in every HeartbeatReply)

What is answered is in from_worker.py; how strictly all of it is read, in codec.py.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from workers.messages.broadcasts import Broadcast, BroadcastRefused, JoinUpdateGroup, LeaveUpdateGroup, OpenUpdateGroup, PrepareBroadcast
from workers.messages.parts import Announcement, Count, Endpoint, Group, GroupId, Lease, Message, Seconds, Text, Transport, Version


class Welcome(Message, frozen=True):
    """Answer to Register."""

    epoch: Count
    announcement: Announcement | None


class Refused(Message, frozen=True):
    """Answer to a message that cannot be taken, with the reason."""

    reason: Text


class HeartbeatReply(Message, frozen=True):
    """Repeats the newest version, so that a lost publication costs one heartbeat. `leases_sent`: how many leases were sent before it: what of
    them has not come by then never will. `interval_s`: how long to wait before the next heartbeat, at least: the larger the fleet, the longer."""

    announcement: Announcement | None
    known: bool
    leases_sent: Count = 0
    interval_s: Seconds = 0.0


class Leases(Message, frozen=True):
    """Work for a rollout worker, against its credit."""

    leases: list[Lease]


class Acknowledged(Message, frozen=True):
    """The group's result arrived (`accepted`), or is not wanted: it had arrived before, or another worker has the lease now. A worker
    that still works on it gives it up."""

    group_id: GroupId
    attempt: Count
    accepted: bool


class RewardElements(Message, frozen=True):
    """Where a rollout worker can have completions judged now (`reward.placement=array`): with every heartbeat."""

    endpoints: list[Endpoint]


class Batch(Message, frozen=True):
    """One copy's share of the batch of one training step.

    `groups` in the order of their prompts; `minibatches[m]` holds the indices into them that belong to PPO minibatch m (of this copy's
    groups: perhaps none). `formed_at`: monotonic clock of the coordinator's node, seconds.
    """

    step: Count
    share: Count
    num_shares: Annotated[int, msgspec.Meta(ge=1)]
    groups: list[Group]
    minibatches: list[list[Count]]
    formed_at: float


class VersionsNeeded(Message, frozen=True):
    """Published versions older than `oldest` are fetched by nobody: the trainer may remove them. Answer to StepFinished."""

    oldest: Version


class Sources(Message, frozen=True):
    """Answer to SourcesRequest: other workers that have `version`, or get it now, nearest first. The trainer's own servers come last, and
    stand in the announcement. `leads`: others are told to fetch from this worker; those of its node that do not lead let it go first."""

    version: Version
    endpoints: list[Endpoint]
    leads: bool = True


class LoadGranted(Message, frozen=True):
    """Answer to LoadRequest, when enough other workers generate."""

    version: Version


class FallbackWanted(Message, frozen=True):
    """To the trainer: a worker cannot get weights by `transport`; offer them by the next one too, the present version at once."""

    transport: Transport
    cause: Text


class CheckpointPart(Message, frozen=True):
    """The coordinator's part of the checkpoint of `step` is written: the answer to the CheckpointRequest that said `final`."""

    step: Count
    final: bool


class Drain(Message, frozen=True):
    """Give back everything (GroupFinished, GroupParked), say Goodbye and leave: the whole run pauses."""

    reason: Text


class Suspended(Message, frozen=True):
    """This coordinator goes away and another one will come: go on with what you hold, keep the results, look for the next one."""

    reason: Text


class Finish(Message, frozen=True):
    """The run has ended: close everything and say Goodbye. An empty `cause` means that it is complete."""

    cause: Text


class VersionAnnounced(Message, frozen=True):
    """New weights are there."""

    announcement: Announcement


FromCoordinator = (Welcome | Refused | HeartbeatReply | Leases | Acknowledged | RewardElements | Sources | LoadGranted | Batch | VersionsNeeded
                   | FallbackWanted | OpenUpdateGroup | JoinUpdateGroup | LeaveUpdateGroup | PrepareBroadcast | Broadcast | BroadcastRefused
                   | CheckpointPart | Drain | Suspended | Finish | VersionAnnounced)

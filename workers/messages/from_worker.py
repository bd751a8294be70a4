"""What workers say to the coordinator, as plain typed structs. A new message stands here and in `FromWorker`, and nowhere else.

    every worker      Register  Heartbeat  WorkerFailed  Goodbye
    rollout worker,   Draining
    reward element
    rollout worker    GroupFinished  GroupRejected  GroupFailed  GroupParked  KeptLogprobs  SourcesRequest  LoadRequest  TransportFailed
                      UpdateGroupJoined  UpdateGroupBroken  BroadcastReady                     (broadcasts.py)
    trainer           BatchRequest  StepFinished  Republished  CheckpointRequest
                      UpdateGroupOpened  UpdateGroupJoined  UpdateGroupBroken  BroadcastWanted (broadcasts.py)

The answers are in from_coordinator.py. A struct with an unknown field, a missing field, or a field of the wrong type is refused by the codec.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from workers.messages.arrays import Float32
from workers.messages.broadcasts import BroadcastReady, BroadcastWanted, UpdateGroupBroken, UpdateGroupJoined, UpdateGroupOpened
from workers.messages.parts import (
    Announcement,
    Count,
    Endpoint,
    EndpointOrNone,
    Group,
    GroupId,
    HeldLease,
    Message,
    Name,
    NumTokens,
    Partial,
    Path,
    Role,
    Text,
    Transport,
    Version,
    WorkerStatus,
)

PROTOCOL = 12
HeldLeases = Annotated[list[HeldLease], msgspec.Meta(max_length=100_000)]


class Register(Message, frozen=True):
    """First message of a worker to a coordinator; repeated after a reconnection. `leases`: what it holds from before, perhaps
    from an earlier coordinator. `job`: its SLURM job (array job id, underscore, task id), '' outside SLURM. `serves`: the endpoint at which
    others can fetch weights from it, or have it judge, '' for none."""

    role: Role
    host: Annotated[str, msgspec.Meta(pattern=r"\A[\w.-]{1,200}\Z")]
    pid: Count
    protocol: Count = PROTOCOL
    leases: HeldLeases = []
    job: Annotated[str, msgspec.Meta(pattern=r"\A[0-9_]{0,40}\Z")] = ""
    serves: EndpointOrNone = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """`held`: the weights loaded; `fetching`: those being fetched, which must not be removed. `capacity`: how many samples the
    worker takes at once (0: no leases, please); `live`: how many of those of `leases` are still being
    generated (None: not known). `leases`: all that it
    holds, so that a lease that was lost on its way is noticed, and one that nobody wants any more is given up; `leases_seen`:
    as the last HeartbeatReply said: younger ones may be on their way. `tokens_in_flight`: how
    many tokens its leases stand for, prompts, what is generated, and what is expected to be; `kv_tokens`: how many its servers' caches hold
    (0: not known). `update_ranks`: how many ranks its servers would have in an update group; 0 where they cannot be in one, or do not all run."""

    held: Version | None = None
    fetching: Version | None = None
    status: WorkerStatus = WorkerStatus()
    capacity: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    live: Count | None = None
    leases: HeldLeases = []
    leases_seen: Count = 0
    tokens_in_flight: NumTokens = 0
    kv_tokens: NumTokens = 0
    update_ranks: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0


class Draining(Message, frozen=True):
    """The worker is about to leave (time limit, preemption): no more leases. What it holds follows as GroupFinished or GroupParked."""

    reason: Text


class GroupFinished(Message, frozen=True):
    """A finished group; sent again until acknowledged."""

    group: Group


class GroupRejected(Message, frozen=True):
    """A finished group that is not to be trained on (`workflow.keep`); sent again until acknowledged. `num_tokens`: those that the
    loss would have counted; `tokens_interrupted`: as in the group; `score`: the mean of its episodes' scores."""

    group_id: GroupId
    attempt: Count
    num_tokens: NumTokens
    tokens_interrupted: NumTokens
    score: Annotated[float, msgspec.Meta(ge=0, le=1)]


class GroupFailed(Message, frozen=True):
    """An infrastructure failure (engine, verifier), never a wrong answer. `fatal`: trying again cannot help. `hopeless`: a verifier, which has
    never given a score to this worker."""

    group_id: GroupId
    attempt: Count
    cause: Text
    fatal: bool = False
    hopeless: bool = False


class GroupParked(Message, frozen=True):
    """A lease given back with what was generated so far; sent again until acknowledged."""

    partial: Partial


class BatchRequest(Message, frozen=True):
    """A leader of training asks for its share of the batch of `step`: copy number `share` of `num_shares` of the model. Share 0 is the
    trainer's own, and the batch is formed once that is asked for: for the present step, or for the next one while this one is computed."""

    step: Count
    share: Count = 0
    num_shares: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1


class StepFinished(Message, frozen=True):
    """The trainer has published `announcement` (step 0: the starting weights). `metrics` are of the step before it."""

    announcement: Announcement
    metrics: Annotated[dict[Name, float], msgspec.Meta(max_length=1000)]


class KeptLogprobs(Message, frozen=True):
    """The log-probs, by the weights from before step `step`, of all tokens of the groups that are kept (groups.kept), in their order; NaN where
    they are not known. Comes before StepFinished."""

    step: Count
    logprobs: Float32


class CheckpointRequest(Message, frozen=True):
    """The trainer saves the state of `step` into `folder`: write the coordinator's part there. `final`: training ends here
    (a batch that was being trained on goes back to the buffer), and nothing more is leased."""

    step: Count
    folder: Path
    final: bool = False


class SourcesRequest(Message, frozen=True):
    """A rollout worker is about to fetch `version`; sent again until answered by Sources. `failed`: endpoints of workers that did not give
    it what they should; they are left out for others too, and the answer names others."""

    version: Version
    failed: Annotated[list[Endpoint], msgspec.Meta(max_length=1000)] = []


class LoadRequest(Message, frozen=True):
    """A rollout worker has fetched `version` and wants to interrupt its engines to load it; sent again until answered by LoadGranted. From
    then on others can fetch it there whole."""

    version: Version


class TransportFailed(Message, frozen=True):
    """A rollout worker cannot get `version` by `transport`: the trainer is to offer it by the next one too."""

    version: Version
    transport: Transport
    cause: Text


class Republished(Message, frozen=True):
    """The trainer offers the version that it published last in more ways than before."""

    announcement: Announcement


class WorkerFailed(Message, frozen=True):
    """The worker is about to exit with an error."""

    cause: Text


class Goodbye(Message, frozen=True):
    """The worker has closed everything and exits; `reason` where it leaves before the end of the run, in order."""

    reason: Text = ""


FromWorker = (Register | Heartbeat | Draining | GroupFinished | GroupRejected | GroupFailed | GroupParked | BatchRequest | StepFinished | Republished
              | KeptLogprobs | CheckpointRequest | SourcesRequest | LoadRequest | TransportFailed | UpdateGroupOpened | UpdateGroupJoined
              | UpdateGroupBroken | BroadcastWanted | BroadcastReady | WorkerFailed | Goodbye)

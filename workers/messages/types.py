"""Every message of a run, as plain typed structs. Adding one here is all that a new message needs.

Worker -> coordinator    Register  Heartbeat  Credit  GroupFinished  GroupFailed  BatchRequest  StepFinished
                         WorkerFailed  Goodbye
Coordinator -> worker    Welcome  Refused  HeartbeatReply  Leases  Acknowledged  Batch  Finish
Coordinator -> all       VersionAnnounced (published; repeated in every HeartbeatReply)

A struct with an unknown field, a missing field, or a field of the wrong type is refused by the codec.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from workers.messages.arrays import Bool, Float32, Int32

PROTOCOL = 1

Count = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=1_000_000)]


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts of messages: immutable and strict."""


class Message(Struct, frozen=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


class Role(str, enum.Enum):
    """What a peer does."""

    rollout = "rollout"
    trainer = "trainer"


class Purpose(str, enum.Enum):
    """What a lease is for; evaluation never takes part in staleness or training."""

    training = "training"
    evaluation = "evaluation"


class Version(Struct, frozen=True, order=True):
    """Which weights: `epoch` counts incarnations of the trainer, `step` completed training steps."""

    epoch: Count
    step: Count

    def __str__(self) -> str:
        return f"{self.epoch}.{self.step}"

    @staticmethod
    def parse(text: str) -> Version:
        """Inverse of `str`; raises ValueError on anything else."""
        epoch, _, step = text.partition(".")
        if not (epoch.isdecimal() and step.isdecimal()):
            raise ValueError(f"version {text!r}: must be EPOCH.STEP, two whole numbers")
        return Version(int(epoch), int(step))


class Announcement(Struct, frozen=True):
    """Published weights: the folder that holds them and the digest of its manifest (BLAKE3, hex)."""

    version: Version
    folder: Path
    digest: Name


class Lease(Struct, frozen=True):
    """Permission to generate one group, by a worker that holds `version` or a newer one."""

    group_id: Name
    attempt: Count
    purpose: Purpose
    version: Version
    prompt_id: Name
    prompt: Text
    verifier: Name
    reference: Text
    seed: Count


class Group(Struct, frozen=True):
    """The samples of one prompt, flattened: sample k has the next `lengths[k]` entries of the per-token arrays.

    `epochs` and `steps` are run-length coded over the flattened tokens by `run_lengths`: which version sampled each.
    `rewards` has one entry a sample.
    """

    group_id: Name
    attempt: Count
    purpose: Purpose
    prompt_id: Name
    prompt: Int32
    lengths: Int32
    tokens: Int32
    logprobs: Float32
    loss_mask: Bool
    rewards: Float32
    scores: Float32
    epochs: Int32
    steps: Int32
    run_lengths: Int32
    num_interruptions: Count = 0
    tokens_interrupted: Count = 0
    generation_s: float = 0.0
    reward_s: float = 0.0
    first_text: Text = ""


class WorkerStatus(Struct, frozen=True):
    """What a worker reports with each heartbeat. Counters count from the worker's start."""

    waiting_for: str = ""
    num_running: Count = 0
    tokens_generated: Count = 0
    tokens_interrupted: Count = 0
    num_updates: Count = 0
    update_s: float = 0.0
    reward_busy_s: float = 0.0
    rewards_killed: Count = 0
    rewards_failed: Count = 0
    idle_s: float = 0.0


class Register(Message, frozen=True):
    """First message of a worker; repeated after a reconnection."""

    role: Role
    host: Name
    pid: Count
    protocol: int = PROTOCOL


class Heartbeat(Message, frozen=True):
    """`held`: the weights loaded; `fetching`: those being fetched, which must not be removed."""

    held: Version | None = None
    fetching: Version | None = None
    status: WorkerStatus = WorkerStatus()


class Credit(Message, frozen=True):
    """The worker can take so many more samples: a training group costs its size, an evaluation prompt one."""

    num_samples: Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class GroupFinished(Message, frozen=True):
    """A finished group; sent again until acknowledged."""

    group: Group


class GroupFailed(Message, frozen=True):
    """An infrastructure failure (engine, verifier), never a wrong answer. `fatal`: trying again cannot help."""

    group_id: Name
    attempt: Count
    cause: Text
    fatal: bool = False


class BatchRequest(Message, frozen=True):
    """The trainer asks for the batch of `step`."""

    step: Count


class StepFinished(Message, frozen=True):
    """The trainer has published `announcement` (step 0: the starting weights). `metrics` are of the step before it."""

    announcement: Announcement
    metrics: dict[str, float]
    tokens_trained: Count


class WorkerFailed(Message, frozen=True):
    """The worker is about to exit with an error."""

    cause: Text


class Goodbye(Message, frozen=True):
    """The worker has closed everything and exits."""


class Welcome(Message, frozen=True):
    """Answer to Register."""

    slot: Count
    epoch: Count
    announcement: Announcement | None


class Refused(Message, frozen=True):
    """Answer to a message that cannot be taken, with the reason."""

    reason: Text


class HeartbeatReply(Message, frozen=True):
    """Repeats the newest version, so that a lost publication costs one heartbeat."""

    announcement: Announcement | None
    known: bool


class Leases(Message, frozen=True):
    """Work for a rollout worker, against its credit."""

    leases: list[Lease]


class Acknowledged(Message, frozen=True):
    """The group arrived (`accepted`), or had arrived before or came too late."""

    group_id: Name
    attempt: Count
    accepted: bool


class Batch(Message, frozen=True):
    """The groups of one training step. `needed`: published versions older than this may be removed."""

    step: Count
    groups: list[Group]
    needed: Version


class Finish(Message, frozen=True):
    """The run has ended: close everything and say Goodbye. An empty `cause` means that it is complete."""

    cause: Text


class VersionAnnounced(Message, frozen=True):
    """New weights are there."""

    announcement: Announcement


FromWorker = Register | Heartbeat | Credit | GroupFinished | GroupFailed | BatchRequest | StepFinished | WorkerFailed | Goodbye
FromCoordinator = Welcome | Refused | HeartbeatReply | Leases | Acknowledged | Batch | Finish | VersionAnnounced

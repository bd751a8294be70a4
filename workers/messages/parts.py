"""What messages are made of: versions, leases, groups, a worker's status. Immutable and strict structs."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from workers.messages.arrays import Bool, Float32, Int32, Uint8
from workers.messages.version import Version as Version

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Exact as a float; thousands of them add up within 64 bits."""
NumTokens = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
GroupId = Annotated[str, msgspec.Meta(pattern=r"\A(g(0|[1-9][0-9]{0,14})|e(0|[1-9][0-9]{0,9})\.(0|[1-9][0-9]{0,9}))\Z")]
"""`g<k>`: training prompt k; `e<step>.<k>`: held-out prompt k, judged at that step."""
_ENDPOINT = r"tcp://[0-9]{1,3}(\.[0-9]{1,3}){3}:[0-9]{1,5}"
Endpoint = Annotated[str, msgspec.Meta(pattern=rf"\A{_ENDPOINT}\Z")]
EndpointOrNone = Annotated[str, msgspec.Meta(pattern=rf"\A({_ENDPOINT})?\Z")]
Transport = Annotated[str, msgspec.Meta(pattern=r"\A(zmq|disk|nccl)\Z")]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Path = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Text = Annotated[str, msgspec.Meta(max_length=1_000_000)]
Prompt = Annotated[str, msgspec.Meta(max_length=2_000_000)]  # rendered: workers/data/limits.py admits half as many characters before
Verifier = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]  # or a weighted sum (workers/reward/verifiers/registry.py)
Reference = Annotated[str, msgspec.Meta(max_length=16 << 20)]  # what a verifier needs; data.max_reference_kb is at most this


class Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts of messages: immutable and strict."""


class Message(Struct, frozen=True, tag=True):
    """Base of all messages; the tag on the wire is the class name."""


class Role(str, enum.Enum):
    """What a peer does. `trainer`: rank 0 of training. `trainer_shard`: leads another copy of the model, and may only fetch its shares of batches.
    `reward`: judges for rollout workers."""

    rollout = "rollout"
    trainer = "trainer"
    trainer_shard = "trainer_shard"
    reward = "reward"


class Purpose(str, enum.Enum):
    """What a lease is for; evaluation never takes part in staleness or training."""

    training = "training"
    evaluation = "evaluation"


def check_purpose(group_id: str, purpose: Purpose) -> None:
    """Raise ValueError unless a group of this id is for `purpose`."""
    if (group_id[:1] == "e") is not (purpose is Purpose.evaluation):
        raise ValueError(f"group {group_id!r}: is not for {purpose.value}. Training groups are g<number>, held-out ones e<step>.<number>")


class Announcement(Struct, frozen=True):
    """Published weights, and where they can be had.

    `digest`: of their manifest (BLAKE3, hex). `folder`: where workers can read them as files, '' where they cannot. `sources`: endpoints
    of the trainer's weight servers; the manifest says which of them has which file.
    """

    version: Version
    folder: Annotated[str, msgspec.Meta(max_length=4096)]
    digest: Name
    sources: Annotated[list[Endpoint], msgspec.Meta(max_length=100_000)] = []

    def offers_more_than(self, other: Announcement) -> bool:
        """Whether this announces the same weights as `other`, which can be had in more ways now."""
        same = (self.version, self.digest) == (other.version, other.digest)
        return same and (bool(self.folder) > bool(other.folder) or len(self.sources) > len(other.sources))


class Turns(Struct, frozen=True):
    """What stands before each sample of a partial: one entry a sample, in the order in which they were asked for.

    Sample k is a turn of conversation `conversations[k]` of episode `episodes[k]`, and follows those of its samples that stand before it. In between
    are the next `outside_lengths[k]` tokens of `outside`, which no weights sampled; `prompted[k]`: the lease's prompt comes before these.
    `cut[k]`: a finished sample ended because it was long, not by itself.
    """

    episodes: Int32
    conversations: Int32
    prompted: Bool
    outside_lengths: Int32
    outside: Int32
    cut: Bool


class Partial(Struct, frozen=True, omit_defaults=True):
    """What has been generated of an unfinished group: sample k has the next `lengths[k]` tokens (0: not begun).

    `finished[k]`: the sample is complete and only its judgement is missing. Versions are coded as in `Group`, and so is `routing`, of the
    finished samples that end their conversation so far. Without `turns` sample k is the answer of episode k to the lease's prompt.
    """

    group_id: GroupId
    attempt: Count
    purpose: Purpose
    lengths: Int32
    finished: Bool
    tokens: Int32
    logprobs: Float32
    epochs: Int32
    steps: Int32
    run_lengths: Int32
    turns: Turns | None = None
    routing: Uint8 | None = None

    def __post_init__(self) -> None:
        check_purpose(self.group_id, self.purpose)


class Lease(Struct, frozen=True):
    """Permission to generate one group, by a worker that holds `version` or a newer one. `partial`: go on from there."""

    group_id: GroupId
    attempt: Count
    purpose: Purpose
    version: Version
    prompt_id: Name
    prompt: Prompt
    verifier: Verifier
    reference: Reference
    seed: Count
    partial: Partial | None = None


class HeldLease(Struct, frozen=True):
    """A lease that a worker works on, or whose result has not been acknowledged; `version`: that of its admission."""

    group_id: GroupId
    attempt: Count
    purpose: Purpose
    version: Version

    def __post_init__(self) -> None:
        check_purpose(self.group_id, self.purpose)


class Group(Struct, frozen=True, omit_defaults=True):
    """The samples of one prompt, flattened: sample k has the next `lengths[k]` entries of the per-token arrays.

    `epochs` and `steps` are run-length coded over the flattened tokens by `run_lengths`: which version sampled each.
    `rewards` has one entry a sample. Tokens that no weights sampled (of users, of tools) have a `loss_mask` of False, a log-prob of 0, and the
    version of the sampled token before them, or of the sample's first. `prompt` is what all samples begin with. `episodes`: each sample's
    episode, ascending from 0; samples of an episode have the same reward. None: every sample is an episode. `answers`: of an evaluation, the
    answer that was found in what each episode had judged, '' where none was. `part_scores`: of a weighted sum of verifiers each one's mean.
    `routing`: the experts that the engine chose, for each sample's prompt and tokens but the last, [tokens, layers, experts a token] (RoutingShape).
    """

    group_id: GroupId
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
    num_interruptions: NumTokens = 0
    tokens_interrupted: NumTokens = 0
    generation_s: Seconds = 0.0
    reward_s: Seconds = 0.0
    first_text: Annotated[str, msgspec.Meta(max_length=2000)] = ""
    episodes: Int32 | None = None
    answers: list[Annotated[str, msgspec.Meta(max_length=200)]] = []
    part_scores: Annotated[dict[Name, Share], msgspec.Meta(max_length=64)] = {}
    routing: Uint8 | None = None

    def __post_init__(self) -> None:
        check_purpose(self.group_id, self.purpose)


class WorkerStatus(Struct, frozen=True):
    """What a worker reports with each heartbeat. Counters count from the worker's start, times in seconds.

    `weights_via`: how the version that it holds came: 'zmq', 'disk' or 'nccl'. `fetch_s`, `fetch_bytes`: what fetching took and brought from other
    nodes (deltas as they travel). `num_fallbacks`: versions that the first transport did not bring; `num_refetched`: chunks that came with a wrong
    digest and were asked for elsewhere. An update is `pause_s` (until the engine stands still), then `load_s`. `num_restarts`: servers that had died
    or hung and were started again. `reward_busy_s`: of reward processes at work; `rewards_killed`: those that were replaced; `rewards_failed`:
    requests without an answer, `rewards_late`: attempts without one in time; `rewards_done`: requests that have it; `num_refused`, `num_malformed`:
    connections without the run's keys, and messages that cannot be read; `idle_s`: without any lease; `sample_s`: of every sample while it was
    generated, added up; `rewards_waiting`, `rewards_wait_s`: requests that wait for a process, or for a reward element, and how long requests have
    waited; `judge_asked` and the others: the counters of the judge (reward/judges/judge_client.py); `judge_error`: of the last question without a
    score.
    """

    waiting_for: Annotated[str, msgspec.Meta(max_length=10_000)] = ""
    num_running: Count = 0
    tokens_generated: Count = 0
    num_updates: Count = 0
    update_s: Seconds = 0.0
    pause_s: Seconds = 0.0
    load_s: Seconds = 0.0
    weights_via: Annotated[str, msgspec.Meta(max_length=20)] = ""
    fetch_s: Seconds = 0.0
    fetch_bytes: Count = 0
    num_fallbacks: Count = 0
    num_refetched: Count = 0
    num_restarts: Count = 0
    reward_busy_s: Seconds = 0.0
    rewards_killed: Count = 0
    rewards_failed: Count = 0
    rewards_late: Count = 0
    rewards_done: Count = 0
    rewards_waiting: Count = 0
    rewards_wait_s: Seconds = 0.0
    idle_s: Seconds = 0.0
    sample_s: Seconds = 0.0
    num_refused: Count = 0
    num_malformed: Count = 0
    judge_asked: Count = 0
    judge_cached: Count = 0
    judge_calls: Count = 0
    judge_failed: Count = 0
    judge_waiting: Count = 0
    judge_s: Seconds = 0.0
    judge_error: Annotated[str, msgspec.Meta(max_length=1000)] = ""

"""Messages about new weights by broadcast (weights.transport=nccl): the group, and each broadcast. Who decides: weights/broadcast_group.py.

A group has a lane for every training rank that sends: a process group in which that rank is rank 0, and those of all servers follow.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from workers.messages.parts import Message, Name, Struct, Text, Version

Port = Annotated[int, msgspec.Meta(gt=0, lt=65536)]
Library = Annotated[str, msgspec.Meta(max_length=100)]
Ranks = Annotated[int, msgspec.Meta(ge=2, le=2**20)]
Address = Annotated[str, msgspec.Meta(pattern=r"\A[0-9]{1,3}(\.[0-9]{1,3}){3}\Z")]
Backend = Annotated[str, msgspec.Meta(pattern=r"\A(nccl|gloo)\Z")]
Sizes = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**40)]], msgspec.Meta(max_length=8)]
Lane = Annotated[int, msgspec.Meta(ge=0, le=2**20)]


class Piece(Struct, frozen=True, array_like=True):
    """A part of the tensor `name`: its place there, by dimension, and its shape."""

    name: Name
    starts: Sizes
    shape: Sizes


class Bucket(Struct, frozen=True, array_like=True):
    """Pieces that come in one broadcast, through one `lane` of the group."""

    lane: Lane
    pieces: Annotated[list[Piece], msgspec.Meta(max_length=1_000_000)]


Buckets = Annotated[list[Bucket], msgspec.Meta(max_length=100_000)]


class OpenUpdateGroup(Message, frozen=True):
    """To the trainer: host the update group `group`, and join it: in each lane there are `num_ranks` with the training rank itself, rank 0."""

    group: Name
    num_ranks: Ranks


class UpdateGroupOpened(Message, frozen=True):
    """The trainer hosts `group` at address:port, and joins it now. `backend`: of torch.distributed. `buckets`: what each broadcast brings.
    `library`: the version of NCCL, '' where the backend is another."""

    group: Name
    address: Address
    port: Port
    backend: Backend
    buckets: Buckets
    library: Library = ""


class JoinUpdateGroup(Message, frozen=True):
    """To a rollout worker: have the servers join all lanes of `group`, as ranks `first_rank` and following of `num_ranks`; the rest as in
    UpdateGroupOpened."""

    group: Name
    address: Address
    port: Port
    backend: Backend
    buckets: Buckets
    first_rank: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    num_ranks: Ranks
    library: Library = ""


def lane_name(group: str, lane: int) -> str:
    """What the process group of a lane is called."""
    return f"{group}.{lane}"


class UpdateGroupJoined(Message, frozen=True):
    """This worker, or the trainer, is in `group` with all its ranks, in all lanes."""

    group: Name


class UpdateGroupBroken(Message, frozen=True):
    """`group` is of no use any more; from anyone in it."""

    group: Name
    cause: Text


class LeaveUpdateGroup(Message, frozen=True):
    """To everyone in `group`: leave it."""

    group: Name
    cause: Text


class BroadcastWanted(Message, frozen=True):
    """The trainer has `version` and waits for Broadcast or BroadcastRefused."""

    version: Version


class PrepareBroadcast(Message, frozen=True):
    """To a rollout worker: `version` is about to come through `group`; interrupt all servers, and say BroadcastReady."""

    group: Name
    version: Version


class BroadcastReady(Message, frozen=True):
    """All servers of this worker stand still and wait for `version`."""

    group: Name
    version: Version


class Broadcast(Message, frozen=True):
    """To everyone in `group`: `version` is broadcast now."""

    group: Name
    version: Version


class BroadcastRefused(Message, frozen=True):
    """To whoever waits for Broadcast: `version` does not come through a group."""

    version: Version
    cause: Text

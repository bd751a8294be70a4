"""Everything by which the coordinator's process changes the state machine, as typed records: what is driven live, recorded and replayed is the same.

    process/ --Input--> advance(core, input) --> Outcome: what is to be sent, said, recorded, saved
"""

from __future__ import annotations

from typing import NamedTuple

from workers.coordinator.core import Coordinator
from workers.coordinator.training.step_records import Record
from workers.messages.codec import MessageError
from workers.messages.from_coordinator import Refused
from workers.messages.from_worker import CheckpointRequest, FromWorker, GroupFinished, GroupParked, GroupRejected
from workers.messages.parts import Message, Role, Struct


class Input(Struct, frozen=True, tag=True, array_like=True):
    """Base: what happens at `now`, seconds on the coordinator's monotonic clock."""

    now: float


class Arrived(Input, frozen=True):
    """A message from a peer."""

    peer: bytes
    message: FromWorker


class Malformed(Input, frozen=True):
    """Something from a peer that cannot be read, and why."""

    peer: bytes
    reason: str


class Ticked(Input, frozen=True):
    """Time has passed."""


class Greeted(Input, frozen=True):
    """Every worker is to hear of the coordinator."""


class Unreachable(Input, frozen=True):
    """A message could not be sent: the connection is gone."""

    peer: bytes


class Lost(Input, frozen=True):
    """A worker is known to be gone: by SLURM, for example."""

    peer: bytes
    why: str


class Absorbed(Input, frozen=True):
    """What a worker has left in the run folder."""

    message: GroupFinished | GroupRejected | GroupParked


class Expected(Input, frozen=True):
    """Of these roles elements wait in SLURM's queue; why there are none of others that are needed."""

    roles: list[Role]
    gone: dict[Role, str]


class Obstructed(Input, frozen=True):
    """The run folder cannot be used: this is why nothing moves."""


class Paused(Input, frozen=True):
    """The whole run is to be saved and to pause."""

    reason: str


class Ended(Input, frozen=True):
    """The run ends, '': complete."""

    cause: str


class Left(Input, frozen=True):
    """This incarnation goes away."""

    cause: str


AnyInput = (Arrived | Malformed | Ticked | Greeted | Unreachable | Lost | Absorbed | Expected | Obstructed | Paused | Ended | Left)
Sent = list[tuple[bytes | None, Message]]


class Outcome(NamedTuple):
    """What follows. `sent`: messages and whom they are for (None: everyone); `notices`: lines for the log; `records`: for the metrics; `checkpoint`:
    who waits for this process's part of one; `wanted`: whether what was absorbed is, and `trouble`: why it cannot be, '' if it can."""

    sent: Sent
    notices: list[str]
    records: list[Record]
    checkpoint: tuple[bytes, CheckpointRequest] | None
    wanted: bool = False
    trouble: str = ""


def advance(core: Coordinator, given: AnyInput) -> Outcome:
    """Let `given` happen."""
    wanted, trouble = False, ""
    try:
        wanted = _happen(core, given)
    except MessageError as error:  # what is to be absorbed does not fit together; nothing has changed
        trouble = str(error)
    sent, core.outbox = core.outbox, []
    notices = core.take_notices()
    records, core.training.records = core.training.records, []
    checkpoint, core.checkpoint = core.checkpoint, None
    return Outcome(sent, notices, records, checkpoint, wanted, trouble)


def _happen(core: Coordinator, given: AnyInput) -> bool:
    match given:
        case Arrived():
            core.handle(given.peer, given.message, given.now)
        case Malformed():
            core.outbox.append((given.peer, Refused(given.reason)))
        case Ticked():
            core.tick(given.now)
        case Greeted():
            core.greet()
        case Unreachable():
            core.registry.unreachable(given.peer, given.now)
        case Lost():
            if (worker := core.registry.workers.get(given.peer)) is not None:
                core.lost(worker, given.why)
        case Absorbed():
            return core.reconciliation.absorb(given.message)
        case Expected():
            core.expected, core.gone = set(given.roles), given.gone
        case Obstructed():
            core.last_progress = given.now
        case Paused():
            core.drain(given.reason, given.now)
        case Ended():
            core.end(given.cause)
        case Left():
            core.left = core.left or given.cause
    return False

"""What a journal keeps of tokens, log-probs and texts: not them, but all that a decision can depend on.

    tokens, logprobs, outside, prompt    size and checksum (the prompt's size alone); least and largest value where the message was refused
    routing                              size and checksum, and whether there are such experts
    loss_mask and other masks            bit by bit
    first_text, answers; prompts         nothing: they only pass through
    all else                             as it is: lengths, versions, rewards, scores, ...

A replayed array of contents is a stand-in: of the same size, with the same extremes, and with the checksum of what stood there. Groups are most
of what is recorded: each field is written by its place, with as little work as can be.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np

from workers.coordinator.recording.inputs import Absorbed, AnyInput, Arrived, Input, Outcome
from workers.messages.arrays import Bool, Float32, Int32, TypedArray, Uint8
from workers.messages.from_coordinator import Batch, Leases
from workers.messages.from_worker import GroupFinished, GroupParked
from workers.messages.parts import Group, Message, Partial, Struct, Turns

CONTENTS: dict[type, tuple[str, ...]] = {
    Group: ("prompt", "tokens", "logprobs", "routing"), Partial: ("tokens", "logprobs", "routing"), Turns: ("outside",)}
"""The fields of contents, by class."""
MASKS = "loss_mask", "finished", "prompted", "cut"
FACTS = {"lengths": Int32, "rewards": Float32, "scores": Float32, "epochs": Int32, "steps": Int32, "run_lengths": Int32, "episodes": Int32,
         "conversations": Int32, "outside_lengths": Int32}
EDGE = 128
LAST = [np.packbits(np.ones(number, bool)).tobytes() for number in range(8)]
"""The last byte of a full mask, by how many bits it has."""


class PieceArrived(Input, frozen=True):
    """`Arrived` or (without a peer) `Absorbed` with a GroupFinished or GroupParked, as it is written: the fields in their order."""

    peer: bytes | None
    parked: bool
    fields: list[Any]


Written = AnyInput | PieceArrived


def checksum(array: TypedArray) -> int:
    """The CRC-32 of its first and last `EDGE` bytes: it tells one array from another, at little cost, and withstands nobody. Reckoned once."""
    known = vars(array).get("checksum")
    if known is None:
        content = array.data.cast("B") if array.size else b""
        whole = len(content) <= 2 * EDGE
        known = vars(array)["checksum"] = zlib.crc32(content) if whole else zlib.crc32(content[-EDGE:], zlib.crc32(content[:EDGE]))
    return known


def stand_in(kind: type[TypedArray], size: int, known: int, least: float = 0, largest: float = 0) -> TypedArray:
    """An array of `size` items in the place of one whose checksum is `known`."""
    array = np.zeros(size, kind.wire_dtype)
    if size:
        array[-1] = largest
        array[0] = least
    made = array.view(kind)
    vars(made)["checksum"] = known
    return made


def _size(array: TypedArray) -> list:
    return [array.size, 0]


def _sketch(array: TypedArray) -> list:
    return [array.size, checksum(array)]


def _sketch_with_extremes(array: TypedArray) -> list:
    return [array.size, checksum(array), *([array.min().item(), array.max().item()] if array.size else [])]


def _judged(routing: Uint8 | None) -> list | None:
    return None if routing is None else [*_sketch(routing), vars(routing).get("fits", True)]


def _as_judged(sketch: list | None) -> TypedArray | None:
    if sketch is None:
        return None
    made = stand_in(Uint8, *sketch[:2])
    vars(made)["fits"] = sketch[2]
    return made


def _packed(mask: Bool) -> list:
    size, bits = mask.size, np.packbits(mask).tobytes()
    full = bits == b"\xff" * (size // 8) + LAST[size % 8]  # as most masks are
    return [size] if full else [size, bits]


def _unpacked(packed: list) -> Bool:
    size = packed[0]
    bits = packed[1] if len(packed) > 1 else b"\xff" * (size // 8) + LAST[size % 8]
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=size).view(np.bool_).view(Bool)


def _facts(kind: type[TypedArray]) -> Callable[[bytes | None], TypedArray | None]:
    return lambda content: None if content is None else np.frombuffer(content, kind.wire_dtype).view(kind)


def _as_it_is(value: Any) -> Any:
    return value


class Field(NamedTuple):
    """How a field is written, plainly and where the message was refused, and how it is read."""

    plainly: Callable[[Any], Any]
    refused: Callable[[Any], Any]
    read: Callable[[Any], Any]


def _field(kind: type[Struct], name: str) -> Field:
    def of(write: Callable[[Any], Any], read: Callable[[Any], Any] = _as_it_is) -> Field:
        return Field(write, write, read)

    if name == "prompt":
        return Field(_size, lambda array: [array.size, 0, *_sketch_with_extremes(array)[2:]], lambda sketch: stand_in(Int32, *sketch))
    if name == "routing":
        return of(_judged, _as_judged)
    if name in CONTENTS[kind]:
        array = Float32 if name == "logprobs" else Int32
        return Field(_sketch, _sketch_with_extremes, lambda sketch: stand_in(array, *sketch))
    if name in MASKS:
        return of(_packed, _unpacked)
    if name in FACTS:
        return of(lambda array: None if array is None else array.tobytes(), _facts(FACTS[name]))
    if name == "turns":
        return of(lambda turns: turns and written(turns), lambda fields: fields and read_back(Turns, fields))
    if name == "answers":
        return of(len, lambda number: [""] * number)
    return of((lambda text: "") if name == "first_text" else _as_it_is)


class Layout:
    """How the fields of a class are written and read, in their order."""

    def __init__(self, kind: type[Struct]) -> None:
        fields = [_field(kind, name) for name in kind.__struct_fields__]
        self.values = attrgetter(*kind.__struct_fields__)
        self.plainly, self.refused, self.read = ([field[place] for field in fields] for place in range(3))


LAYOUTS: dict[type, Layout] = {kind: Layout(kind) for kind in (Group, Partial, Turns)}


def written(piece: Group | Partial | Turns, refused: bool = False) -> list:
    """The fields of a piece as they are written."""
    layout = LAYOUTS[type(piece)]
    return [write(value) for write, value in zip(layout.refused if refused else layout.plainly, layout.values(piece), strict=True)]


def read_back(kind: type, fields: list) -> Any:
    """The inverse. Raises ValueError, TypeError on anything else."""
    values = [back(value) for back, value in zip(LAYOUTS[kind].read, fields, strict=True)]
    return msgspec.convert(dict(zip(kind.__struct_fields__, values, strict=True)), kind)  # type: ignore[attr-defined]


def recorded(given: AnyInput, refused: bool) -> Written:
    """`given` as it is written."""
    message = getattr(given, "message", None)
    if type(message) is GroupFinished:
        return PieceArrived(given.now, getattr(given, "peer", None), False, written(message.group, refused))
    if type(message) is GroupParked:
        return PieceArrived(given.now, getattr(given, "peer", None), True, written(message.partial, refused))
    return given


def replayed(given: Written) -> AnyInput:
    """The inverse. Raises ValueError, TypeError where it is none."""
    if not isinstance(given, PieceArrived):
        return given
    message = GroupParked(read_back(Partial, given.fields)) if given.parked else GroupFinished(read_back(Group, given.fields))
    return Absorbed(given.now, message) if given.peer is None else Arrived(given.now, given.peer, message)


def described(outcome: Outcome) -> list:
    """What was decided, as it is written and compared: whether what was absorbed is wanted, what is wrong with it, and what is sent to whom, without
    contents, prompts and texts."""
    return [outcome.wanted, outcome.trouble, *[(peer, _described(message)) for peer, message in outcome.sent]]


def _described(message: Message) -> object:
    if type(message) is Leases:
        return {"type": "Leases", "leases": [(lease.group_id, lease.attempt, lease.version, lease.seed) for lease in message.leases]}
    if type(message) is Batch:
        return {"type": "Batch", "groups": [group.group_id for group in message.groups]} | {
            name: getattr(message, name) for name in ("step", "share", "num_shares", "minibatches", "formed_at")}
    return message

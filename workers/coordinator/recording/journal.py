"""The journal of one incarnation: records in frames, in parts that can each be replayed alone.

    part    frame frame ...                     the first record of the first frame is a Start
    frame   length, CRC-32 (4 bytes each, big-endian), then as many bytes: a msgpack list of records, compressed by zstd
    record  Start   where it begins: config, code, and the state at that moment
            Entry   an input, and what was decided
            Point   the digest of the state after the input before it

What stands in an input for tokens and texts: contents.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import msgspec
import zstandard

from workers.coordinator.core import Coordinator
from workers.coordinator.groups.supervised_groups import Example, TrainingExamples
from workers.coordinator.recording.contents import Written, described, recorded, replayed
from workers.coordinator.recording.frozen_state import freeze
from workers.coordinator.recording.inputs import AnyInput, Outcome
from workers.messages.from_coordinator import Refused
from workers.messages.parts import Struct

FORMAT = 2
HEAD = struct.Struct(">II")
MAX_FRAME = 1 << 30
CRASHED: list = []
"""No decisions: every other input has some."""


class JournalError(ValueError):
    """A journal that cannot be read. Its text says where and why."""


class ExampleSizes(Struct, frozen=True, array_like=True):
    """An example that a supervised run has asked its data set for; `trouble`: why it cannot be trained on, '' if it can."""

    index: int
    id: str
    num_prompt: int
    num_response: int
    trouble: str


class Start(Struct, frozen=True, tag=True, array_like=True):
    """Where a part begins. `code`: the version of Headway and a digest of the modules that decide. `config`: config.json. `first`: the number of the
    input that comes next, in this incarnation. `now`, `wall`, `seconds`: the coordinator's clock, seconds since 1970, and since the run began."""

    format: int
    code: str
    config: bytes
    epoch: int
    part: int
    first: int
    now: float
    wall: float
    seconds: float
    num_heldout: int
    state: dict[str, bytes]


class Entry(Struct, frozen=True, tag=True, array_like=True):
    """An input; what was decided, as `described` tells it (`CRASHED`: it raised an exception); the examples that were asked for."""

    given: Written
    decided: msgspec.Raw
    examples: list[ExampleSizes]


class Point(Struct, frozen=True, tag=True, array_like=True):
    """The digest of each part of the state after input `number`."""

    number: int
    digests: dict[str, bytes]


Record = Start | Entry | Point
_compressor, _decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def start(core: Coordinator, code: str, config: bytes, part: int, first: int, now: float, wall: float, seconds: float) -> Start:
    """The beginning of a part, with the state now. Raises `StateError`."""
    return Start(FORMAT, code, config, core.epoch, part, first, now, wall, seconds, len(core.office.heldout), freeze(core))


def entry(given: AnyInput, outcome: Outcome | None, examples: list[ExampleSizes]) -> Entry:
    """What is written of an input; `outcome`: None where it has raised an exception."""
    if outcome is None:
        return Entry(recorded(given, refused=True), CRASHED, examples)  # type: ignore[arg-type]
    kinds = [type(message) for _, message in outcome.sent]
    return Entry(recorded(given, Refused in kinds or bool(outcome.trouble)), described(outcome), examples)  # type: ignore[arg-type]  # encoded with all the rest, at once


def decided(outcome: Outcome) -> bytes:
    """What was decided, as it is written."""
    return _encoder.encode(described(outcome))


def frame(records: Sequence[Record]) -> bytes:
    """Records as one frame. Raises TypeError for what cannot be written."""
    content = _compressor.compress(_encoder.encode(records))
    return HEAD.pack(len(content), zlib.crc32(content)) + content


def records(content: bytes) -> Iterator[bytes]:
    """The encoded records of a part; a last frame that was not written to its end is left out. Raises `JournalError` for a damaged one."""
    place = 0
    while place + HEAD.size <= len(content):
        length, check = HEAD.unpack_from(content, place)
        body = content[place + HEAD.size:place + HEAD.size + length]
        if len(body) < length:
            return
        if zlib.crc32(body) != check:
            if place + HEAD.size + length == len(content):
                return
            raise JournalError(f"the frame at byte {place} is damaged")
        yield from _inside(body, place)
        place += HEAD.size + length


def _inside(body: bytes, place: int) -> Iterator[bytes]:
    try:
        size = zstandard.frame_content_size(body)
        if not 0 <= size <= MAX_FRAME:
            raise JournalError(f"the frame at byte {place} holds {size} bytes: must be from 0 to {MAX_FRAME}")
        found = msgspec.msgpack.decode(_decompressor.decompress(body), type=list[msgspec.Raw])
    except (zstandard.ZstdError, msgspec.MsgspecError) as error:
        raise JournalError(f"the frame at byte {place} cannot be read ({error})") from error
    yield from map(bytes, found)


def decode(record: bytes) -> Record:
    """Raises `JournalError`: another version of Headway knows other messages."""
    try:
        found = _decoder.decode(record)
        return msgspec.structs.replace(found, given=replayed(found.given)) if isinstance(found, Entry) else found
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise JournalError(f"a record that this code cannot read ({error})") from error


class Witness:
    """The examples of a supervised run; `seen`: those asked for since it was emptied."""

    def __init__(self, source: TrainingExamples, context_length: int) -> None:
        self._source, self._context_length = source, context_length
        self.seen: list[ExampleSizes] = []

    def train(self, index: int) -> Example:
        """Training example number `index`."""
        example = self._source.train(index)
        self.seen.append(ExampleSizes(index, example.id, len(example.prompt), len(example.response), example.problem(self._context_length)))
        return example

    def take(self) -> list[ExampleSizes]:
        """Empty `seen`."""
        seen, self.seen = self.seen, []
        return seen

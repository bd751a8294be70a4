"""Messages to bytes and back: a msgpack header (msgspec, strict), then the bytes of every array.

    bytes     msgpack of a list: [header, array, array, ...]         kept in files as it is (`pack`), cut into pieces for sockets (`encode`)
    header    msgpack of the struct; an array stands as [its place in the list, number of items]
    array     its bytes, little-endian, dtype fixed by the field's class

Pieces are small, so that a socket can turn away anything larger before it knows who sends it (door.py).

No pickle. Whatever does not fit exactly (unknown tag or field, wrong type, nested too deep, an array too short, too long, missing,
left over or used twice, more bytes than allowed) raises `MessageError`; nothing is decoded in part.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np

from workers.messages.arrays import TypedArray
from workers.messages.from_coordinator import FromCoordinator
from workers.messages.from_worker import FromWorker
from workers.messages.parts import Message

MAX_PIECE = 1 << 16
SMALL = 1 << 15
"""Parts up to this size are put together, which is faster than to send them each as a piece."""
MAX_FRAME = MAX_PIECE + 256
"""Of a piece on its way: with what encryption adds."""
LARGE_PIECE = 1 << 20
LARGE_FRAME = LARGE_PIECE + MAX_FRAME - MAX_PIECE
"""Of what the coordinator says, to whom has come to it: a batch is large, and each piece costs its event loop 30 us."""
FEW_ARRAYS, MANY_ARRAYS = 64, 1 << 22
"""In one message: of a worker; of the coordinator, which sends whole batches."""
MALFORMED = (msgspec.MsgspecError, ValueError, TypeError, RecursionError)
"""What decoding raises: ValueError for text that is no UTF-8, RecursionError for what is nested too deep."""


class MessageError(ValueError):
    """A message that is malformed or over its limit. Its text names what and the rule."""


def encode(message: Message, max_piece: int = MAX_PIECE) -> list[bytes | memoryview]:
    """`message` in pieces of at most `max_piece` bytes; large arrays are not copied. Raises TypeError or ValueError where an array has not its
    field's class."""
    return list(_pieces(buffers(message), max_piece))


def cut(content: bytes | memoryview, max_piece: int = MAX_PIECE) -> list[bytes | memoryview]:
    """`content` in pieces of at most `max_piece` bytes, none of which is a copy."""
    view = memoryview(content)
    return [view[start: start + max_piece] for start in range(0, len(view), max_piece)]


def _pieces(parts: list[bytes | memoryview], max_piece: int) -> Iterator[bytes | memoryview]:
    small = bytearray()
    for part in parts:
        if len(part) <= SMALL and len(small) + len(part) <= MAX_PIECE:
            small += part
            continue
        if small:
            yield bytes(small)
            small.clear()
        yield from cut(part, max_piece)
    if small:
        yield bytes(small)


def pack(message: Message) -> bytes:
    """`message` as one piece of bytes; `Decoder.unpack` reads it back. Raises as `encode`."""
    return b"".join(buffers(message))


def buffers(message: Message) -> list[bytes | memoryview]:
    """What `pack` gives, in parts, among them the message's own arrays. Raises as `encode`."""
    frames: list[bytes | memoryview] = [b""]

    def array_hook(value: object) -> list[int]:
        if not isinstance(value, TypedArray):
            raise TypeError(f"{type(value).__name__}: an array field takes Int32, Float32, Uint8 or Bool. Build it with `.of(...)`")
        plain = np.ascontiguousarray(value, dtype=value.wire_dtype)
        frames.append(plain.view(np.uint8).data if plain.size else b"")
        return [len(frames) - 1, plain.size]

    frames[0] = msgspec.msgpack.encode(message, enc_hook=array_hook)
    return [struct.pack(">BI", 0xDD, len(frames)), *(part for frame in frames for part in (struct.pack(">BI", 0xC6, len(frame)), frame))]


class Decoder:
    """Decodes one direction of traffic, with a limit on the bytes of one message, and on the arrays in it."""

    def __init__(self, union: object, max_bytes: int, max_arrays: int = FEW_ARRAYS) -> None:
        self._max_bytes = max_bytes
        self._split = msgspec.msgpack.Decoder(Annotated[list[memoryview], msgspec.Meta(max_length=1 + max_arrays)])
        self._frames: list[memoryview] = []
        self._used: set[int] = set()
        self._decoder = msgspec.msgpack.Decoder(union, strict=True, dec_hook=self._array)

    def decode(self, pieces: Sequence[bytes | memoryview]) -> Message:
        """The message in `pieces`. Raises `MessageError`."""
        size = sum(len(piece) for piece in pieces)
        if size > self._max_bytes:
            raise MessageError(f"a message of {size} bytes: must be at most {self._max_bytes}. Raise transport.max_message_mb")
        return self.unpack(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    def unpack(self, content: bytes | memoryview) -> Message:
        """The message in what `pack` gave. Raises `MessageError`."""
        try:
            self._frames, self._used = self._split.decode(content), set()
            if not self._frames:
                raise ValueError("it has no header")
            message = self._decoder.decode(self._frames[0])
        except MALFORMED as error:
            raise MessageError(f"malformed message: {error}") from error
        if len(self._used) != len(self._frames) - 1:
            raise MessageError(f"a message of {len(self._frames) - 1} array frames: its header names {len(self._used)}")
        return message

    def _array(self, kind: type, value: object) -> TypedArray:
        if not issubclass(kind, TypedArray):
            raise TypeError(f"cannot decode {kind.__name__}")
        if not (isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)):
            raise ValueError(f"array reference {value!r}: must be [frame, number of items]")
        index, num_items = value
        if not 1 <= index < len(self._frames) or index in self._used:
            raise ValueError(f"array frame {index}: must be one of 1..{len(self._frames) - 1}, each used once")
        self._used.add(index)
        dtype, frame = np.dtype(kind.wire_dtype), self._frames[index]
        if num_items < 0 or len(frame) != num_items * dtype.itemsize:
            raise ValueError(f"array frame of {len(frame)} bytes: must be {num_items} items of {dtype.itemsize} bytes")
        if dtype.kind == "b" and num_items and np.frombuffer(frame, np.uint8).max() > 1:
            raise ValueError("mask frame: every byte must be 0 or 1")
        array = np.frombuffer(frame, dtype=dtype)
        return (array if array.flags.aligned else array.copy()).view(kind)


def from_workers(max_bytes: int) -> Decoder:
    """Decoder of what the coordinator receives."""
    return Decoder(FromWorker, max_bytes)


def from_coordinator(max_bytes: int) -> Decoder:
    """Decoder of what workers receive."""
    return Decoder(FromCoordinator, max_bytes, MANY_ARRAYS)

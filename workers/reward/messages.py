"""What the reward pool and its processes say to each other, and how a message is framed.

For each `Request` the process answers `Loaded` once the verifier is imported, so that a slow first import is not
counted as a hang, and then `Scored` or `Failed`. A frame is a 4-byte big-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import msgspec

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024


class Request(msgspec.Struct, frozen=True):
    """Score `completion` with `verifier`."""

    verifier: str
    prompt: str
    completion: str
    reference: str


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The verifier is imported and now runs."""


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """The verifier's score, in [0, 1]."""

    score: float


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The verifier gave no score; `cause` says why."""

    cause: str


Reply = Loaded | Scored | Failed


def frame(message: Request | Reply) -> bytes:
    """`message` as bytes with its length in front. Raises `ValueError` if it is longer than the protocol allows."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is more than the {MAX_FRAME_BYTES} allowed. Shorten the prompt or the reference")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def frame_length(head: bytes) -> int:
    """Length in bytes of the body that follows `head`. Raises `ValueError` if it is beyond the protocol's limit."""
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is more than the {MAX_FRAME_BYTES} allowed: the stream is out of step")
    return length

"""What the reward pool and its processes say to each other, and how a message is framed.

For each request the process answers `Loaded` once the function that it names is imported, so that a slow first import is not
counted as a hang, and then `Scored` or `Executed`, or `Failed`. `Load` asks for no more than the first of these. A frame is a
4-byte big-endian length and that many bytes of msgpack.
"""

from __future__ import annotations

import msgspec

from workers.config import RewardConfig, SandboxConfig
from workers.run.texts import well_formed

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 * 1024 * 1024
PYTHON_TOOL = "workers.reward.code.tool_program:run"
"""The function (program text) -> its output that runs a model's programs."""


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a process is told at its start."""

    reward: RewardConfig
    sandbox: SandboxConfig


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Score `completion` with `verifier`."""

    verifier: str
    prompt: str
    completion: str
    reference: str

    @property
    def function(self) -> str:
        """Which function answers it."""
        return self.verifier


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Run a model's program in the sandbox."""

    code: str

    @property
    def function(self) -> str:
        """Which function answers it."""
        return PYTHON_TOOL


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Import a function, a verifier or the Python tool, and have its module look at this node."""

    function: str


Request = Score | Execute | Load


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The function is imported and now runs."""


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """The verifier's score, in [0, 1]."""

    score: float


class Executed(msgspec.Struct, frozen=True, tag="executed"):
    """What the program printed, or how it failed, as the model is to see it."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """There is no answer; `cause` says why."""

    cause: str


Reply = Loaded | Scored | Executed | Failed


def described(request: Request) -> str:
    """For people: whose doing it is where there is no answer."""
    return "the Python tool" if request.function == PYTHON_TOOL else f"verifier {request.function!r}"


def frame(message: Request | Reply) -> bytes:
    """`message` as bytes with its length in front, its texts well-formed. Raises `ValueError` if it is longer than the protocol allows."""
    texts = {name: well_formed(value) for name, value in msgspec.structs.asdict(message).items() if isinstance(value, str)}
    body = msgspec.msgpack.encode(msgspec.structs.replace(message, **texts))
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is more than the {MAX_FRAME_BYTES} allowed. Shorten the prompt or the reference")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def frame_length(head: bytes) -> int:
    """Length in bytes of the body that follows `head`. Raises `ValueError` if it is beyond the protocol's limit."""
    length = int.from_bytes(head, "big")
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is more than the {MAX_FRAME_BYTES} allowed: the stream is out of step")
    return length

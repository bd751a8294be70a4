"""What the scheduler, the model and the sampler pass to each other: requests and steps. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Copy(NamedTuple):
    """Copy the first `length` positions of cache row `source` to row `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn. temperature 0 is greedy; top_k -1 and top_p 1 are no cut."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int = 0


@dataclass
class Span:
    """Output tokens [start, end) were sampled under weights `version`."""

    version: str
    start: int
    end: int


class Finish(NamedTuple):
    """Why a request ended: kind is 'stop' (detail: token id or stop string), 'length' or 'abort' (detail: message)."""

    kind: str
    detail: int | str


@dataclass(eq=False)
class Request:
    """One generation. The first block is given by the client, the second is kept by the scheduler."""

    rid: str
    prompt: list[int]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    sampling: Sampling = Sampling()

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    routing: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    num_retractions: int = 0
    row: int | None = None
    finish: Finish | None = None

    @property
    def last_token(self) -> int:
        """The token that the next decode step feeds."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def num_fed(self) -> int:
        """Tokens whose KV must stand in the row before the next decode step; also that step's position."""
        return len(self.prompt) + len(self.output) - 1

    def fed(self) -> list[int]:
        """Every token but the last."""
        return (self.prompt + self.output)[:-1]


class Segment(NamedTuple):
    """Prefill `tokens` at positions [start, start + len(tokens)) of `row`."""

    row: int
    start: int
    tokens: list[int]


class Step(NamedTuple):
    """One unit of work: copies in order, then the cache at `capacity` positions, then prefill, then decode.

    `decode[i]` owns row i; its `last_token` is fed at position `num_fed`.
    """

    copies: list[Copy]
    capacity: int
    prefill: list[Segment]
    decode: list[Request]

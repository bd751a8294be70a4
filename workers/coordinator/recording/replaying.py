"""A journal through the same code: every input in its turn, and what was decided, and the state at every point, held against what was recorded.

Prompts are not read: they only pass through the coordinator (contents.py). The first difference ends a replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast

import msgspec

from workers.config import Config
from workers.coordinator.core import Coordinator
from workers.coordinator.recording.frozen_state import StateError, digests, freeze, thaw
from workers.coordinator.recording.inputs import AnyInput, Arrived, Outcome, advance
from workers.coordinator.recording.journal import CRASHED, FORMAT, Entry, ExampleSizes, JournalError, Point, Start, decided, decode


class Difference(Exception):
    """What the replay does otherwise than the run did."""


class BlankPrompt(NamedTuple):
    """In the place of any prompt."""

    id: str = "-"
    text: str = ""
    verifier: str = "-"
    reference: str = ""


class BlankPrompts:
    """As many held-out prompts as there were."""

    def __init__(self, num_heldout: int) -> None:
        self._heldout = [BlankPrompt()] * num_heldout

    def train(self, index: int) -> BlankPrompt:
        """Prompt `index`."""
        return BlankPrompt()

    def heldout(self) -> list[BlankPrompt]:
        """The held-out ones."""
        return self._heldout


@dataclass(frozen=True)
class BlankExample:
    """An example of the recorded sizes."""

    id: str
    prompt: list[int]
    response: list[int]
    trouble: str

    def problem(self, context_length: int) -> str:
        """As it was found."""
        return self.trouble


class BlankExamples:
    """What the journal knows of the examples that were asked for."""

    def __init__(self) -> None:
        self.known: dict[int, ExampleSizes] = {}

    def train(self, index: int) -> BlankExample:
        """Training example number `index`."""
        if (sizes := self.known.get(index)) is None:
            raise Difference(f"example {index} is asked for, which was not asked for then")
        return BlankExample(sizes.id, [0] * sizes.num_prompt, [0] * sizes.num_response, sizes.trouble)


class Step(NamedTuple):
    """One input replayed. `number`: which of its incarnation; `given`, `outcome`: None at the start of a part, where `gap` says whether something
    before it is missing."""

    number: int
    wall: float
    given: AnyInput | None
    outcome: Outcome | None
    core: Coordinator
    gap: bool


@dataclass
class Replay:
    """Of one run's parts, oldest first. `code`: of this Headway; `until`: seconds since 1970 after which nothing is replayed; `notes`: what is no
    difference, but worth knowing."""

    code: str
    until: float = math.inf
    core: Coordinator | None = None
    start: Start | None = None
    number: int = 0
    num_points: int = 0
    num_inputs: int = 0

    def __post_init__(self) -> None:
        self.notes: list[str] = []
        self.now = 0.0
        self._examples = BlankExamples()

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"incarnation {self.start.epoch}, input {self.number}" if self.start is not None else "the beginning"

    def play(self, encoded: Iterable[bytes]) -> Iterator[Step]:
        """The records of one part, one input after the other. Raises `Difference`, `JournalError`."""
        for content in encoded:
            match decode(content):
                case Start() as start:
                    if start.wall > self.until:
                        return
                    yield self._begin(start)
                case Entry() as entry:
                    if self.core is not None and self.wall(entry.given.now) > self.until:
                        return
                    yield self._entry(entry)
                case Point() as point:
                    self._point(point)

    def wall(self, now: float) -> float:
        """The time since 1970 at `now` of the coordinator's clock."""
        assert self.start is not None
        return self.start.wall + now - self.start.now

    def seconds(self, now: float) -> float:
        """The time since the run began."""
        assert self.start is not None
        return self.start.seconds + now - self.start.now

    def _begin(self, start: Start) -> Step:
        if start.format != FORMAT:
            raise JournalError(f"a journal of format {start.format}: this Headway reads {FORMAT}")
        if start.code != self.code and not self.notes:
            self.notes.append(f"recorded by {start.code}; this is {self.code}: replayed as far as they agree")
        same = self.core is not None and self.start is not None and self.start.epoch == start.epoch
        follows = same and self.number + 1 == start.first
        if follows and self.core is not None:
            self._compare(digests(start.state), f"the state with which part {start.part} begins")
            self.start = start
        else:
            self.core, self.start, self.number = self._thawed(start), start, start.first - 1
        assert self.core is not None
        self.now = start.now
        return Step(self.number, start.wall, None, None, self.core, gap=not follows and start.first > 1)

    def _thawed(self, start: Start) -> Coordinator:
        config = msgspec.json.decode(start.config, type=Config)
        self._examples = BlankExamples()
        core = Coordinator(config, BlankPrompts(start.num_heldout), start.epoch, start.now, None, self._examples if config.supervised else None)
        try:
            thaw(core, start.state)
        except StateError as error:
            raise Difference(f"incarnation {start.epoch}, part {start.part}: {error}") from error
        return core

    def _entry(self, entry: Entry) -> Step:
        if self.core is None:
            raise JournalError("an input before any state")
        self.number, self.num_inputs = self.number + 1, self.num_inputs + 1
        self.now = entry.given.now
        self._examples.known = {sizes.index: sizes for sizes in entry.examples}
        given, then = cast(AnyInput, entry.given), bytes(entry.decided)
        crashed = msgspec.msgpack.decode(then) == CRASHED
        try:
            outcome = advance(self.core, given)
        except Difference as error:
            raise Difference(f"{self.place} ({describe(given)}): {error}") from error
        except Exception as error:
            what = f"{self.place} ({describe(given)}): {type(error).__name__}: {error}"
            raise Difference(what if not crashed else f"{what}. So it was then: the coordinator has died of it") from error
        if (now := decided(outcome)) != then:
            raise Difference(f"{self.place} ({describe(given)}): then {_words(then)}; now {_words(now)}")
        return Step(self.number, self.wall(given.now), given, outcome, self.core, gap=False)

    def _point(self, point: Point) -> None:
        if point.number != self.number:
            raise Difference(f"{self.place}: the state after input {point.number} was recorded here")
        self.num_points += 1
        self._compare(point.digests, "the state")

    def _compare(self, recorded: dict[str, bytes], what: str) -> None:
        assert self.core is not None
        now = digests(freeze(self.core))
        if other := sorted(name for name in recorded.keys() | now.keys() if recorded.get(name) != now.get(name)):
            raise Difference(f"{self.place}: {what} is another one: {', '.join(other)}")


def _words(decided: bytes) -> str:
    """What was decided, for people."""
    found = msgspec.msgpack.decode(decided, strict=False)
    if found == CRASHED:
        return "the coordinator died"
    _, trouble, *sent = found
    words = [f"{message.pop('type')} to {(peer or b'everyone').hex()[:12] if peer else 'everyone'} {message}" for peer, message in sent]
    return trouble or "; ".join(words) or "nothing was sent"


def describe(given: AnyInput) -> str:
    """An input in a few words."""
    words = [type(given).__name__]
    if isinstance(given, Arrived):
        message = given.message
        piece = getattr(message, "group", None) or getattr(message, "partial", None) or message
        words = [type(message).__name__, *[str(getattr(piece, name)) for name in ("group_id", "attempt", "step") if hasattr(piece, name)],
                 f"from {given.peer.hex()[:12]}"]
    return " ".join([*words, *[text for name in ("cause", "reason", "why") if isinstance(text := getattr(given, name, None), str) and text]])

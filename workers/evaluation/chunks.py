"""Which element judges which prompts, and what has been judged: files in the run folder, and no other talk between elements.

    evaluation/000003.1         chunk 3 was claimed, for the first time: by whom         created by link(2): one claimant
    evaluation/000003.1.jsonl   what this claimant has judged, one line a prompt, on disk before the next one
    evaluation/000003.done      every prompt of chunk 3 stands in one of its files; it is empty
    evaluation/crash.000001     an element has failed: why, and how much was judged by then
    evaluation/NAME.status      what an element is doing, for people

An element takes a chunk that nobody has claimed, or one whose claimant is gone, with all but what that one has judged; what it could not judge
is tried again. Claims save work, they guard nothing: a prompt that was judged twice, by an element cut off from SLURM, counts once, as in
its first line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from workers.run.files import append_whole, read_lines, sync, write_once

CHUNKS_PER_REPLICA = 8
"""So that replicas which start late, or are slow, leave the rest to others."""
_CLAIM = re.compile(r"(\d{6})\.(\d+)")


class Holder(msgspec.Struct, frozen=True):
    """One life of an element. `job`: SLURM's id of its job ('' on one machine), `restarts`: how often that was requeued; `created`: when its
    process was, seconds since 1970."""

    job: str
    restarts: int
    element: str
    host: str
    pid: int
    created: float

    @property
    def name(self) -> str:
        """A file's name that no other life has."""
        return f"{self.element}.{self.restarts}" if self.job else f"{self.host}-{self.pid}"


class Crash(msgspec.Struct, frozen=True):
    """How a life ended that failed. `num_judged`: prompts that all elements had judged by then."""

    cause: str
    num_judged: int


@dataclass
class Chunk:
    """A claimed chunk: its number, the claim's, its prompts by index, and which of those are judged."""

    number: int
    claim: int
    prompts: range
    judged: set[int] = field(default_factory=set)


def divide(num_prompts: int, num_replicas: int) -> list[range]:
    """The prompts of each chunk, by index: a function of the config alone, the same for all elements. Pure."""
    size = max(1, math.ceil(num_prompts / (CHUNKS_PER_REPLICA * num_replicas)))
    return [range(first, min(first + size, num_prompts)) for first in range(0, num_prompts, size)]


class Chunks:
    """All chunks, as the element `holder` sees them; `chunks` are their prompts, to be set before any is claimed. `living` says which of some
    claimants are still there, itself left out."""

    def __init__(self, folder: Path, holder: Holder, living: Callable[[Sequence[Holder]], set[Holder]]) -> None:
        self.folder, self.holder = folder, holder
        self.chunks: Sequence[range] = ()
        self._living, self._taken = living, set[int]()

    def claim(self) -> Chunk | None:
        """Take a chunk; None where there is none to take now. Raises OSError; what was claimed by then is taken by another call."""
        claims, done = self._claims()
        for number in range(len(self.chunks)):
            if number not in claims and number not in done and (taken := self._take(number, 1)):
                return taken
        open_claims = {number: numbers for number, numbers in claims.items() if number not in done}
        holders = {number: self._holder(number, max(numbers)) for number, numbers in open_claims.items()}
        others = [holder for holder in holders.values() if holder != self.holder]
        living = self._living(list(dict.fromkeys(others))) if others else set()
        for number, holder in sorted(holders.items()):
            gone = number not in self._taken if holder == self.holder else holder not in living
            if gone and (taken := self._take(number, max(open_claims[number]) + 1)):
                return taken
        return None

    def write(self, chunk: Chunk, index: int, content: bytes) -> None:
        """Bring a judged prompt to disk, one JSON object in one line, and note whether that was the chunk's last. Raises OSError."""
        path = self._file(chunk.number, chunk.claim)
        append_whole(path, content + b"\n")
        sync(path)
        chunk.judged.add(index)
        self._note(chunk)

    def complete(self) -> bool:
        """Whether every prompt is judged."""
        return len(self._claims()[1]) == len(self.chunks)

    def read(self, number: int) -> dict[int, dict]:
        """The lines of a chunk's prompts, by index: of one that was judged twice, the first, and one that failed only where it was never judged."""
        return self._lines(number, self._claims()[0].get(number, []))

    def read_all(self) -> Iterator[dict[int, dict]]:
        """Those of every chunk that was begun, in their order; the folder is listed once."""
        return (self._lines(number, claims) for number, claims in sorted(self._claims()[0].items()))

    def _lines(self, number: int, claims: Iterable[int]) -> dict[int, dict]:
        found: dict[int, dict] = {}
        for claim in sorted(claims):
            for line in read_lines(self._file(number, claim)):
                if "failed" in found.get(line["index"], {"failed": ""}):
                    found[line["index"]] = line
        return found

    def num_judged(self) -> int:
        """How many prompts are judged; one that failed is not."""
        return sum("failed" not in line for lines in self.read_all() for line in lines.values())

    def crashed(self, cause: str) -> int:
        """Note that this life has failed; returns how many have in a row, without any prompt being judged in between."""
        num_judged = self.num_judged()
        record = msgspec.json.encode(Crash(cause, num_judged))
        number = 1 + len(list(self.folder.glob("crash.*")))
        while not write_once(self.folder / f"crash.{number:06d}", record):
            number += 1
        crashes = [msgspec.json.decode(path.read_bytes(), type=Crash) for path in sorted(self.folder.glob("crash.*"))]
        return sum(crash.num_judged == num_judged for crash in crashes)

    def _take(self, number: int, claim: int) -> Chunk | None:
        if not write_once(self.folder / f"{number:06d}.{claim}", msgspec.json.encode(self.holder)):
            return None
        chunk = Chunk(number, claim, self.chunks[number], {index for index, line in self.read(number).items() if "failed" not in line})
        self._note(chunk)  # its claimant may have gone between its last prompt and saying so
        self._taken.add(number)
        return chunk

    def _note(self, chunk: Chunk) -> None:
        if len(chunk.judged) == len(chunk.prompts):
            write_once(self.folder / f"{chunk.number:06d}.done", b"")

    def _claims(self) -> tuple[dict[int, list[int]], set[int]]:
        """The claims of each chunk that has any, and the chunks that are done."""
        names = [entry.name for entry in self.folder.iterdir()]
        claims: dict[int, list[int]] = {}
        for found in filter(None, map(_CLAIM.fullmatch, names)):
            claims.setdefault(int(found[1]), []).append(int(found[2]))
        return claims, {int(name.removesuffix(".done")) for name in names if name.endswith(".done")}

    def _holder(self, number: int, claim: int) -> Holder:
        return msgspec.json.decode((self.folder / f"{number:06d}.{claim}").read_bytes(), type=Holder)

    def _file(self, number: int, claim: int) -> Path:
        return self.folder / f"{number:06d}.{claim}.jsonl"

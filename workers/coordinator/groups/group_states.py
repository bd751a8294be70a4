"""What is known of a training group in each of its states, and its name. Pure; how it goes from one to the next: ledger.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from workers.messages.parts import Group, Partial


@dataclass
class Running:
    """A leased group: its prompt's index, the attempt, the worker, the version it was admitted at, since when it has been missed, and the number of
    the lease among those of its worker (0: from before this incarnation)."""

    index: int
    attempt: int
    worker: bytes
    admitted_at: int
    partial: Partial | None = None
    missed_since: float | None = None
    number: int = 0


@dataclass
class Parked:
    """A group that was given back with what had been generated."""

    index: int
    admitted_at: int
    partial: Partial


@dataclass
class Finished:
    """A finished group waiting to be consumed, or in training."""

    group: Group
    admitted_at: int
    order: int


class Leased(NamedTuple):
    """A lease as it is handed out. `num_failures`: how often the group has failed before."""

    group_id: str
    prompt_index: int
    attempt: int
    admitted_at: int
    num_failures: int
    partial: Partial | None


def index_of(group_id: str) -> int:
    """The prompt's index in a group's id, `g<k>`. Raises ValueError on any other."""
    if group_id[:1] != "g" or not group_id[1:].isdecimal():
        raise ValueError(f"group {group_id!r}: must be g<number>")
    return int(group_id[1:])

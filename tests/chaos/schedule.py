"""What breaks when: the same for the same seed and minutes. What it hits is the seed's choice among what is there at that moment."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

EVERY_S = 20.0
LEAST_S, MOST_S = 3.0, 60.0
FAULTS = {
    "kill": 4, "stop": 4, "preempt": 2, "requeue": 2, "requeue_twice": 1, "hold": 1, "suspend": 2, "power_cut": 2, "power_cut_at_checkpoint": 1,
    "network_cut": 2, "controller_away": 1, "database_away": 1, "folder_full": 1, "folder_stalled": 1, "clock_off": 1}
"""And how often each comes, against the others."""


@dataclass(frozen=True)
class Event:
    """`fault` begins `at_s` seconds after the first training steps, and lasts `lasts_s`. `choice`, from 0 to below 1: which of those it can hit."""

    number: int
    at_s: float
    fault: str
    lasts_s: float
    choice: float


def schedule(seed: int, minutes: float) -> list[Event]:
    """One event every `EVERY_S` seconds; each kind once before any comes twice, as far as there is time."""
    random, number = Random(seed), int(60 * minutes / EVERY_S)
    first = sorted(FAULTS, key=lambda _: random.random())[:number]
    kinds = first + random.choices(list(FAULTS), list(FAULTS.values()), k=number - len(first))
    random.shuffle(kinds)
    return [Event(index, index * EVERY_S, kind, random.uniform(LEAST_S, MOST_S), random.random()) for index, kind in enumerate(kinds)]

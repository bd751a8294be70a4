"""Which reward element gets the next request: the one with the fewest in flight. A pure state machine; time is an argument.

    listed by the coordinator --> takes requests
    lost (its connection broke) --> rests for REST_S, then is tried again if it is still listed
    not listed any more (it drains, or the coordinator lost it) --> takes nothing new; dropped when nothing is in flight, or after UNLISTED_S
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

REST_S = 5.0
UNLISTED_S = 60.0
"""An element that drains answers what it has begun before this; one that is stuck is waited for no longer."""


@dataclass
class Standing:
    """One element, as this worker sees it."""

    in_flight: int = 0
    rests_until: float = 0.0
    unlisted_since: float | None = None


@dataclass
class Balance:
    """All elements that are listed, or have something of ours in flight, by endpoint."""

    elements: dict[str, Standing] = field(default_factory=dict)

    def listed(self, endpoints: Iterable[str], now: float) -> None:
        """The coordinator has said which elements there are."""
        there = set(endpoints)
        for endpoint in there - self.elements.keys():
            self.elements[endpoint] = Standing()
        for endpoint, element in self.elements.items():
            if endpoint in there:
                element.unlisted_since = None
            elif element.unlisted_since is None:
                element.unlisted_since = now

    @property
    def any_listed(self) -> bool:
        """Whether there is an element, as the coordinator has it."""
        return any(element.unlisted_since is None for element in self.elements.values())

    def least_busy(self, now: float) -> str | None:
        """The element that gets the next request; None if there is none now."""
        able = {endpoint: element for endpoint, element in self.elements.items() if element.unlisted_since is None and now >= element.rests_until}
        return min(able, key=lambda endpoint: able[endpoint].in_flight, default=None)

    @contextlib.contextmanager
    def in_flight(self, endpoint: str) -> Iterator[None]:
        """A request is in flight until it has an answer, or will have none."""
        element = self.elements[endpoint]  # which may be dropped, and listed anew, meanwhile
        element.in_flight += 1
        try:
            yield
        finally:
            element.in_flight -= 1

    def lost(self, endpoint: str, now: float) -> None:
        """The connection is gone."""
        if endpoint in self.elements:
            self.elements[endpoint].rests_until = now + REST_S

    def to_drop(self, now: float) -> list[str]:
        """The elements that are to be forgotten now, with their connections; what is in flight there goes to others."""
        found = [endpoint for endpoint, element in self.elements.items() if element.unlisted_since is not None
                 and (not element.in_flight or now - element.unlisted_since > UNLISTED_S)]
        for endpoint in found:
            del self.elements[endpoint]
        return found

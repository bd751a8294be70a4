"""Time that passes for a coordinator as its process lets it pass: tick by tick. One long step would be that process's own pause."""

from __future__ import annotations

from collections.abc import Iterator

from workers.coordinator.core import Coordinator


def moments(core: Coordinator, now: float) -> Iterator[float]:
    """When to let it tick until `now`: once a second."""
    while core.ticked + 1.0 < now:
        yield core.ticked + 1.0
    yield now


def pass_time(core: Coordinator, now: float) -> None:
    """Until `now`, a tick a second."""
    for moment in moments(core, now):
        core.tick(moment)

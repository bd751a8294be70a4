"""Time that passes for a coordinator as its process lets it pass: tick by tick. One long step would be that process's own pause."""

from __future__ import annotations

from workers.coordinator.core import Coordinator


def pass_time(core: Coordinator, now: float) -> None:
    """Until `now`, a tick a second."""
    while core.ticked + 1.0 < now:
        core.tick(core.ticked + 1.0)
    core.tick(now)

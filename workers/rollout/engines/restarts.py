"""Whether a server that has ended is started again, and how long that waits. Pure."""

from __future__ import annotations

LONGEST_S = 60.0


class Restarts:
    """At most `most` restarts within `window_s` seconds, each after twice the pause of the one before."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most, self._window_s = most, window_s
        self._times: list[float] = []

    @property
    def num_recent(self) -> int:
        """Restarts that count, when it was asked for last."""
        return len(self._times)

    def next(self, now: float) -> float | None:
        """Seconds to wait before the next one; None: there have been too many. `now`: monotonic."""
        self._times = [time for time in self._times if now - time < self._window_s]
        if len(self._times) >= self._most:
            return None
        self._times.append(now)
        return min(LONGEST_S, 2.0 ** (len(self._times) - 1))

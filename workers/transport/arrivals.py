"""The connections that others have made to a server, and how many of them came to nothing. Pure; time is an argument.

ZeroMQ tells the descriptor of a connection when it is accepted and when it ends, but not of which one a handshake has succeeded. So
strangers are among those that are young: whoever has shown no key by then has been cut off.
"""

from __future__ import annotations


class Arrivals:
    """Connections by their descriptors; `young_s`: how long a handshake may take."""

    def __init__(self, young_s: float) -> None:
        self._young_s = young_s
        self._accepted_at: dict[int, float] = {}  # oldest first
        self._peers: set[int] = set()
        self._num_accepted = self._num_admitted = self._num_denied = self._num_refused = 0

    def accepted(self, number: int, now: float) -> None:
        """Somebody has connected."""
        self._num_accepted += 1
        self._forget(number)
        self._accepted_at[number] = now

    def known(self, number: int) -> None:
        """It has been seen that this one has shown its key: it is no stranger, whatever events are still to come."""
        self._peers.add(number)

    def admitted(self) -> None:
        """One of them has shown its key."""
        self._num_admitted += 1

    def denied(self) -> None:
        """One of them has shown a wrong one. It may stay for as long as a handshake may take."""
        self._num_denied += 1

    def ended(self, number: int) -> None:
        """A connection has ended."""
        self._forget(number)
        self._count()

    def young(self, now: float) -> list[int]:
        """The connections that may be of strangers, oldest first."""
        while self._accepted_at and now - (oldest := next(iter(self._accepted_at.items())))[1] > self._young_s:
            self._forget(oldest[0])
        self._count()
        return [number for number in self._accepted_at if number not in self._peers]

    def _forget(self, number: int) -> None:
        self._accepted_at.pop(number, None)
        self._peers.discard(number)

    @property
    def num_admitted(self) -> int:
        """Connections that have shown a key."""
        return self._num_admitted

    @property
    def num_refused(self) -> int:
        """Connections that have ended without a key. Those of peers that are young are taken for strangers': it is never too high."""
        return max(self._num_denied, self._num_refused)

    def _count(self) -> None:
        self._num_refused = max(self._num_refused, self._num_accepted - self._num_admitted - len(self._accepted_at))

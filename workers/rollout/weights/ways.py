"""By which transport a version is fetched first. Pure.

Streaming (zmq) goes before shared storage (disk), which is there for when streaming fails. A worker for which it has failed begins with
storage for the next versions, 1, 3, 7, ... of them, so that a network that lets nothing through costs its deadline ever more rarely,
and one that is mended is found again.
"""

from __future__ import annotations

from workers.messages.types import Announcement

ZMQ, DISK = "zmq", "disk"
LONGEST = 6


class Ways:
    """What this worker's experience with the transports is."""

    def __init__(self) -> None:
        self._num_failures = 0  # of streaming, in a row
        self._num_avoided = 0  # how many versions are still to begin with storage
        self._avoids = False

    def begin(self) -> None:
        """Another version is to be fetched."""
        self._avoids = self._num_avoided > 0
        self._num_avoided = max(0, self._num_avoided - 1)

    def of(self, announcement: Announcement) -> list[str]:
        """The transports by which this version is offered, the one to try first first."""
        offered = [way for way, there in ((ZMQ, announcement.sources), (DISK, announcement.folder)) if there]
        return offered[::-1] if self._avoids else offered

    def worked(self, way: str) -> None:
        """A version came by `way`."""
        if way == ZMQ:
            self._num_failures = self._num_avoided = 0

    def failed(self, way: str) -> None:
        """A version did not come by `way`."""
        if way == ZMQ:
            self._num_failures = min(self._num_failures + 1, LONGEST)
            self._num_avoided = 2**self._num_failures - 1

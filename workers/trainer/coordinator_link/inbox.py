"""What the thread of a link hands to the main thread."""

from __future__ import annotations

import queue
from typing import Generic, NamedTuple, TypeVar

from workers.messages.from_coordinator import Batch

Item = TypeVar("Item")


class Received(NamedTuple):
    """A batch and when it arrived, by the monotonic clock (seconds)."""

    batch: Batch
    at: float


class Inbox(Generic[Item]):
    """A queue that ends with an error, which whoever takes from then on gets. Reentrant: signal handlers put, too."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Item | Exception] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Hand over `item`."""
        self._queue.put(item)

    def end(self, error: Exception) -> None:
        """Nothing follows any more, because of `error`."""
        self._queue.put(error)

    def take(self, timeout_s: float | None) -> Item:
        """The next item; waits for it. Raises the error that ended it, queue.Empty after `timeout_s` (None: never)."""
        item = self._queue.get(timeout=timeout_s)
        if isinstance(item, Exception):
            self._queue.put(item)
            raise item
        return item

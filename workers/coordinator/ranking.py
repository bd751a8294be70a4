"""The first of many things in the order of keys that change, without looking at all of them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)
SPARE = 16
"""So many entries that count no more a heap may hold beside as many as those that do."""


class Ranking(Generic[Item]):
    """Items, each with a key; keys can be compared, and no two are equal. A change costs O(log n), `first` O(log n) for each change before it:
    what changes leaves its old entry in the heap, where it is passed over."""

    def __init__(self) -> None:
        self._keys: dict[Item, Any] = {}
        self._heap: list[tuple[Any, Item]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, item: Item, key: Any) -> None:
        """Take in an item, or give it another key."""
        if self._keys.get(item) == key:
            return
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + SPARE:
            self._heap = sorted((key, item) for item, key in self._keys.items())

    def drop(self, item: Item) -> None:
        """Leave out an item, if it is there."""
        self._keys.pop(item, None)

    def first(self) -> Item | None:
        """The item with the least key; None without any."""
        while self._heap:
            key, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def first_where(self, wanted: Callable[[Item], bool]) -> Item | None:
        """The item with the least key of those that are `wanted`. O(n log n)."""
        return next((item for item in sorted(self._keys, key=lambda item: self._keys[item]) if wanted(item)), None)

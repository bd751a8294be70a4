"""Dynamic micro-batches under a token budget: Algorithm 1 of AReaL (arXiv 2505.24298), padding-free packing.

Longest first; a new micro-batch is opened while fewer than the wanted number exist or when none has room; otherwise the
item goes to the micro-batch that fits and holds the fewest items (of those, the one with the most room). Before that, the
items are divided among data-parallel ranks, each of which packs its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, min_microbatches: int = 1) -> list[list[int]]:
    """Spread items over micro-batches of at most `capacity` tokens; returns lists of indices into `lengths`.

    Every index occurs exactly once. At least `min_microbatches` lists come back, unless there are fewer items.
    Micro-batches are indexed by their count of items, and by room within one count, so that 8,192 items take a few
    hundredths of a second. Raises ValueError where an item is longer than `capacity`, or is not positive.
    """
    check_lengths(lengths, capacity)
    microbatches: list[list[int]] = []
    by_count: list[list[tuple[int, int]]] = [[]]  # by_count[c]: heap of (-room, micro-batch) of those holding c items
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        length = lengths[index]
        count = _fewest_with_room(by_count, length) if len(microbatches) >= min_microbatches else 0
        if count == 0:
            room, target = capacity, len(microbatches)
            microbatches.append([])
        else:
            negative_room, target = heapq.heappop(by_count[count])
            room = -negative_room
        microbatches[target].append(index)
        if count + 1 == len(by_count):
            by_count.append([])
        heapq.heappush(by_count[count + 1], (length - room, target))
    return microbatches


def check_lengths(lengths: Sequence[int], capacity: int) -> None:
    """Raise ValueError where an item is longer than `capacity`, or is not positive."""
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"item {index} has {length} tokens, more than the budget of {capacity} tokens for a micro-batch. "
                             f"Raise trainer.microbatch_tokens to {length} or more, or lower workflow.max_new_tokens")
        if length < 1:
            raise ValueError(f"item {index} has {length} tokens: it must have at least 1. Drop empty items")


def divide(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divide items into `num_shares` shares of about equal tokens; returns ascending indices into `lengths`.

    Longest first, each to the share that holds the fewest tokens so far: no share is above 4/3 of the smallest possible
    largest share. Every index occurs exactly once; shares are empty where there are fewer items.
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    by_tokens = [(0, share) for share in range(num_shares)]
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        tokens, share = by_tokens[0]
        heapq.heapreplace(by_tokens, (tokens + lengths[index], share))
        shares[share].append(index)
    return [sorted(share) for share in shares]


def _fewest_with_room(by_count: list[list[tuple[int, int]]], length: int) -> int:
    """The smallest count of items among micro-batches with room for `length` tokens, 0 where there is none."""
    for count, heap in enumerate(by_count):
        if heap and -heap[0][0] >= length:
            return count
    return 0

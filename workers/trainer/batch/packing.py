"""Dynamic micro-batches under a token budget: Algorithm 1 of AReaL (arXiv 2505.24298), padding-free packing.

Longest first; a new micro-batch is opened while fewer than the wanted number exist or when none has room; otherwise the
item goes to the micro-batch that fits and holds the fewest items (of those, the one with the most room).
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int, min_microbatches: int = 1) -> list[list[int]]:
    """Spread items over micro-batches of at most `capacity` tokens; returns lists of indices into `lengths`.

    Every index occurs exactly once. Copies of the model that step together need equal numbers of micro-batches: where
    `pack(lengths, capacity)` has no more than `min_microbatches`, exactly `min_microbatches` come back, none of them empty,
    or as many as there are items where these are fewer. Raises ValueError where an item is longer than `capacity`, or is
    not positive.
    """
    check_lengths(lengths, capacity)
    packed = _spread(lengths, capacity, min_microbatches)
    wanted = min(min_microbatches, len(lengths))
    if len(packed) > wanted > 1:
        # Evenly spread items can leave no micro-batch enough room for the last ones, where fuller ones would have had it.
        fewest = _spread(lengths, capacity, 1)
        if len(fewest) < len(packed):
            return _split(fewest, lengths, wanted)
    return packed


def balance(lengths: Sequence[int], capacity: int, number: int) -> list[list[int]]:
    """`pack` into `number` micro-batches or more, of about as many tokens each where there is room: pipeline stages wait for the longest.

    Each item, longest first, goes where the fewest tokens are (Graham, Bounds on Multiprocessing Timing Anomalies, 1969).
    """
    check_lengths(lengths, capacity)
    lightest = [(0, target) for target in range(min(number, len(lengths)))]
    even: list[list[int]] = [[] for _ in lightest]
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        tokens, target = lightest[0]
        even[target].append(index)
        heapq.heapreplace(lightest, (tokens + lengths[index], target))
    return even if all(tokens <= capacity for tokens, _ in lightest) else pack(lengths, capacity, number)


def _spread(lengths: Sequence[int], capacity: int, min_microbatches: int) -> list[list[int]]:
    """Algorithm 1. Micro-batches are indexed by their count of items, and by room within one count."""
    microbatches: list[list[int]] = []
    by_count: dict[int, list[tuple[int, int]]] = {}  # by_count[c]: heap of (-room, micro-batch) of those holding c items
    counts: list[int] = []  # the keys of by_count in order; at most sqrt(2 len(lengths)), as that many add up to all items
    for index in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        length = lengths[index]
        count = _fewest_with_room(counts, by_count, length) if len(microbatches) >= min_microbatches else 0
        if count == 0:
            room, target = capacity, len(microbatches)
            microbatches.append([])
        else:
            negative_room, target = heapq.heappop(by_count[count])
            room = -negative_room
            if not by_count[count]:
                del by_count[count]
                counts.remove(count)
        microbatches[target].append(index)
        if count + 1 not in by_count:
            by_count[count + 1] = []
            bisect.insort(counts, count + 1)
        heapq.heappush(by_count[count + 1], (length - room, target))
    return microbatches


def _fewest_with_room(counts: list[int], by_count: dict[int, list[tuple[int, int]]], length: int) -> int:
    """The smallest count of items among micro-batches with room for `length` tokens, 0 where there is none."""
    for count in counts:
        if -by_count[count][0][0] >= length:
            return count
    return 0


def _split(microbatches: list[list[int]], lengths: Sequence[int], number: int) -> list[list[int]]:
    """Halve those of the most tokens until there are `number` (at most one for each item)."""
    single = [items for items in microbatches if len(items) == 1]
    several = [(-sum(lengths[item] for item in items), items) for items in microbatches if len(items) > 1]
    heapq.heapify(several)
    while len(single) + len(several) < number:
        halves: tuple[list[int], list[int]] = ([], [])
        tokens = [0, 0]
        for item in heapq.heappop(several)[1]:
            lighter = int(tokens[1] < tokens[0])
            halves[lighter].append(item)
            tokens[lighter] += lengths[item]
        for items, sum_of in zip(halves, tokens, strict=True):
            if len(items) == 1:
                single.append(items)
            else:
                heapq.heappush(several, (-sum_of, items))
    return single + [items for _, items in several]


def check_lengths(lengths: Sequence[int], capacity: int) -> None:
    """Raise ValueError where an item is longer than `capacity`, or is not positive."""
    for index, length in enumerate(lengths):
        if length > capacity:
            raise ValueError(f"item {index} has {length} tokens, more than the budget of {capacity} tokens for a micro-batch. "
                             f"Raise trainer.microbatch_tokens to {length} or more, or lower workflow.max_new_tokens")
        if length < 1:
            raise ValueError(f"item {index} has {length} tokens: it must have at least 1. Drop empty items")

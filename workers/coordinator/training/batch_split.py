"""How a batch is divided into PPO minibatches, and each of those among the copies of the model. Pure.

    groups, by length --strata of M, similar in length--> one of each to every of M minibatches    equal numbers, about equal tokens
    groups of a minibatch --largest differencing--> copies                                         about equal tokens

Optimizer steps wait for the copy that has most to do, so tokens are balanced over the copies within every minibatch. Which of the
groups of about one length meet in a minibatch is drawn anew for every seed, the same on any machine and Python.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Sequence

from workers.config import Config
from workers.messages.from_coordinator import Batch
from workers.messages.parts import Group

# Lengths within a quarter of an octave count as similar: their order is drawn.
STRATA_PER_OCTAVE = 4


def divide_batch(lengths: Sequence[int], num_minibatches: int, num_copies: int, seed_material: Sequence[int]) -> list[list[list[int]]]:
    """Indices into `lengths` (tokens of each group, positive) by minibatch and copy, ascending; a function of its arguments alone.

    Every index occurs once. Minibatches hold equal numbers of groups (to one, where they cannot be equal). Tokens of two of them
    differ by no more than two lengths of one stratum do, those of two copies in a minibatch by no more than its longest group. A copy
    has no group in a minibatch only where that has fewer groups than copies.
    """
    minibatches = _minibatches(lengths, num_minibatches, seed_material)
    tokens = [0] * num_copies
    divided = []
    for members in minibatches:
        copies: list[list[int]] = [[] for _ in range(num_copies)]
        shares = _differencing([(lengths[index], index) for index in members], num_copies)
        # The most tokens to the copy that has had fewest, so that whole batches are balanced too.
        for copy, share in zip(sorted(range(num_copies), key=lambda number: (tokens[number], number)), shares, strict=True):
            copies[copy] = sorted(share)
            tokens[copy] += sum(lengths[index] for index in share)
        divided.append(copies)
    return divided


def _minibatches(lengths: Sequence[int], number: int, seed_material: Sequence[int]) -> list[list[int]]:
    """Each stratum gives its longest to the minibatch with the fewest tokens, and so on.

    So the largest difference between two minibatches is at most max(the one before, the stratum's): strata go in the order of theirs.
    """
    drawn = [_draw(seed_material, index) for index in range(len(lengths))]
    similar = sorted(range(len(lengths)), key=lambda index: (-int(math.log2(lengths[index]) * STRATA_PER_OCTAVE), drawn[index]))
    strata = [sorted(similar[start:start + number], key=lambda index: (-lengths[index], drawn[index]))
              for start in range(0, len(similar), number)]
    incomplete = [strata.pop()] if len(lengths) % number else []
    strata.sort(key=lambda stratum: (lengths[stratum[-1]] - lengths[stratum[0]], drawn[stratum[0]]))
    minibatches: list[list[int]] = [[] for _ in range(number)]
    tokens = [0] * number
    for stratum in incomplete + strata:
        fewest_first = sorted(range(number), key=lambda minibatch: (tokens[minibatch], _draw(seed_material, -1 - minibatch)))
        for minibatch, index in zip(fewest_first, stratum, strict=False):
            minibatches[minibatch].append(index)
            tokens[minibatch] += lengths[index]
    return minibatches


def _differencing(items: Iterable[tuple[int, int]], number: int) -> list[list[int]]:
    """The indices of `items` (tokens, index) in `number` shares of about equal tokens, the most first.

    Karmarkar and Karp's largest differencing method: of all partial divisions, at first one for each item, the two whose shares
    differ most are joined, the largest shares of one to the smallest of the other. So no share is empty while items are enough.
    """
    heap = []
    for tokens, index in items:
        shares = [(tokens, [index])] + [(0, [])] * (number - 1)
        heap.append((-(tokens if number > 1 else 0), index, shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        second = heapq.heappop(heap)[2]
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie, joined))
    return [indices for _, indices in heap[0][2]] if heap else [[] for _ in range(number)]


def _draw(seed_material: Sequence[int], number: int) -> bytes:
    """A random value for `number`, to sort by."""
    return hashlib.blake2b(repr((*seed_material, number)).encode(), digest_size=8).digest()


def make_shares(config: Config, step: int, groups: list[Group], num_shares: int, formed_at: float) -> list[Batch]:
    """The batch of `step` for `num_shares` copies, balanced by tokens; the same for the same groups, seed and step."""
    lengths = [_num_tokens(group, config.trainer.share_prompts) for group in groups]
    divided = divide_batch(lengths, config.trainer.num_minibatches, num_shares, [config.run.seed, step])
    shares = []
    for share in range(num_shares):
        own = sorted(index for minibatch in divided for index in minibatch[share])
        place = {index: position for position, index in enumerate(own)}
        shares.append(Batch(step, share, num_shares, [groups[index] for index in own],
                            [[place[index] for index in minibatch[share]] for minibatch in divided], formed_at))
    return shares


def _num_tokens(group: Group, share_prompts: bool) -> int:
    """Tokens that the trainer passes through the model for `group`."""
    return int(group.lengths.sum()) + group.prompt.size * (1 if share_prompts else group.lengths.size)

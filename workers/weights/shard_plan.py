"""Which training rank sends which shard of the model to the engines, in which order: planned once from who holds what. Pure, no torch.

    sizes and holders of all shards --assign--> the rank that sends each --into_buckets--> runs of bytes, one rank's after another's

Ranks that hold the same share the sending of it, so that nobody sends much more than the others; every shard is sent by one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

BUCKET_BYTES = 128 << 20
"""Three of them are in a rank's memory at once, beside what one parameter takes that is put together."""
MAX_SENDERS = 8
"""More only where it takes more to have everything. Each is another process group of every engine rank, which takes the buckets one by one
all the same."""


def assign(sizes: Sequence[int], holders: Sequence[Sequence[int]], max_senders: int = MAX_SENDERS) -> list[int]:
    """Who sends each shard, of `sizes` bytes, that the ranks `holders` have; the largest first, each by the holder with the fewest bytes so far.

    At most `max_senders` ranks send, or one of every set of holders that no other sender is in.
    """
    senders, homes = set[int](), sorted({tuple(ranks) for ranks in holders}, key=lambda ranks: (len(ranks), ranks))
    room = max(1, max_senders // sum(not any(set(other) < set(ranks) for other in homes) for ranks in homes))
    for ranks in homes:
        if senders.isdisjoint(ranks):
            step = max(1, len(ranks) // room)
            senders.update(ranks[::step][:room])
    sources, sent = [0] * len(sizes), dict.fromkeys(senders, 0)
    for shard in sorted(range(len(sizes)), key=lambda shard: -sizes[shard]):
        source = min((rank for rank in holders[shard] if rank in senders), key=lambda rank: (sent[rank], rank))
        sources[shard], sent[source] = source, sent[source] + sizes[shard]
    return sources


def into_buckets(sizes: Sequence[int], sources: Sequence[int], limit: int = BUCKET_BYTES) -> list[list[int]]:
    """The shards in buckets of one source and of at most `limit` bytes each, in their order of travel: in turn one of every source. A larger
    shard has a bucket of its own."""
    filled: dict[int, list[list[int]]] = {source: [] for source in sorted(set(sources))}
    room = dict.fromkeys(filled, 0)
    for shard, (size, source) in enumerate(zip(sizes, sources, strict=True)):
        if size > room[source]:
            filled[source].append([])
            room[source] = limit
        filled[source][-1].append(shard)
        room[source] -= size
    rounds = max(map(len, filled.values()), default=0)
    return [buckets[number] for number in range(rounds) for buckets in filled.values() if number < len(buckets)]

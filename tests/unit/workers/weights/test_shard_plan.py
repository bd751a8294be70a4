"""Who sends which shard, and which travel together: every shard once, by one who has it, and nobody much more than the others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from workers.weights.shard_plan import assign, into_buckets


@st.composite
def held(draw: Any) -> tuple[list[int], list[tuple[int, ...]]]:
    """Sizes of shards, and who holds each: stages of ranks, of which some shards are on all and others on every other one, as experts are."""
    stages, ranks, split = draw(st.integers(1, 4)), draw(st.integers(1, 8)), draw(st.integers(1, 3))
    homes = [tuple(range(stage * ranks, (stage + 1) * ranks)) for stage in range(stages)]
    homes += [home[part::split] for home in homes for part in range(split) if home[part::split]]
    shards = draw(st.lists(st.tuples(st.integers(1, 1000), st.sampled_from(homes)), min_size=1, max_size=60))
    return [size for size, _ in shards], [ranks for _, ranks in shards]


@given(held(), st.integers(1, 12))
def test_every_shard_has_a_sender_that_holds_it_and_none_of_them_could_do_less(case: tuple[list[int], list[tuple[int, ...]]], most: int) -> None:
    sizes, holders = case
    sources = assign(sizes, holders, most)
    assert all(source in ranks for source, ranks in zip(sources, holders, strict=True))
    sent = {rank: sum(size for size, source in zip(sizes, sources, strict=True) if source == rank) for rank in set(sources)}
    for rank in sent:
        last = min((shard for shard, source in enumerate(sources) if source == rank), key=lambda shard: (sizes[shard], -shard))
        others = [sent[other] for other in holders[last] if other in sent]
        assert sent[rank] - sizes[last] <= min(others), "the last one went to whoever had the least"
    homes = set(holders)
    narrow = [home for home in homes if not any(set(other) < set(home) for other in homes)]
    assert len(sent) <= max(most, len(narrow)), "more only where it takes more to have everything"
    assert assign(sizes, holders, most) == sources, "on all ranks alike"


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3)), max_size=40), st.integers(1, 80))
def test_buckets_are_of_one_source_each_in_turn_and_no_larger_than_they_must_be(shards: list[tuple[int, int]], limit: int) -> None:
    sizes, sources = [size for size, _ in shards], [source for _, source in shards]
    buckets = into_buckets(sizes, sources, limit)
    assert sorted(shard for bucket in buckets for shard in bucket) == list(range(len(shards)))
    for source in set(sources):
        own = [bucket for bucket in buckets if sources[bucket[0]] == source]
        assert [shard for bucket in own for shard in bucket] == [shard for shard in range(len(shards)) if sources[shard] == source]
        for bucket, following in zip(own, [*own[1:], None], strict=True):
            size = sum(sizes[shard] for shard in bucket)
            assert size <= limit or len(bucket) == 1
            assert following is None or size + sizes[following[0]] > limit
    for first, second in pairwise(buckets):
        rounds = [[sources[bucket[0]] for bucket in buckets[:buckets.index(one)]].count(sources[one[0]]) for one in (first, second)]
        assert rounds[0] <= rounds[1], "every source before any one's next"

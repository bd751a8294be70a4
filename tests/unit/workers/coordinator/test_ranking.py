"""The first of many, as if all were looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.coordinator.ranking import SPARE, Ranking

CHANGES = st.lists(st.tuples(st.sampled_from("abcde"), st.none() | st.integers(0, 4), st.booleans()), max_size=200)


@given(CHANGES)
def test_first_is_the_least_whatever_was_before(changes: list[tuple[str, int | None, bool]]) -> None:
    ranking: Ranking[str] = Ranking()
    keys: dict[str, tuple[int, str]] = {}
    for item, key, looks in changes:
        if key is None:
            ranking.drop(item)
            keys.pop(item, None)
        else:
            keys[item] = key, item
            ranking.put(item, keys[item])
        assert len(ranking) == len(keys)
        if looks:
            assert ranking.first() == min(keys, key=keys.__getitem__, default=None)
            assert ranking.first_where(lambda one: one not in "ab") == min(keys.keys() - {"a", "b"}, key=keys.__getitem__, default=None)


def test_what_counts_no_more_does_not_pile_up() -> None:
    ranking: Ranking[int] = Ranking()
    for turn in range(1000):
        for item in range(10):
            ranking.put(item, (-turn, item))
    assert len(ranking._heap) <= 2 * 10 + SPARE + 1 and ranking.first() == 0

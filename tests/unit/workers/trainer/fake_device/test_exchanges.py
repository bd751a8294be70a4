"""Ranks whose exchanges do not match are found, whatever is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from workers.trainer.fake_device.exchanges import mismatches
from workers.trainer.fake_device.operators import Call

GROUPS = [(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3)]
SHAPE = (((8, 4), "bfloat16"),)


def step(draws: list[tuple[int, int]]) -> list[list[Call]]:
    """Of four ranks: collectives of groups, and messages from one rank to the next, in an order that would come to its end."""
    calls: list[list[Call]] = [[], [], [], []]
    for kind, number in draws:
        if kind:
            ranks = GROUPS[number]
            for rank in ranks:
                calls[rank].append((f"kind{kind}", ranks, SHAPE))
        else:
            source = number % 3
            calls[source].append(("send", (source, source + 1), SHAPE))
            calls[source + 1].append(("receive", (source + 1, source), SHAPE))
    return calls


DRAWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, len(GROUPS) - 1)), min_size=1, max_size=12)


@given(DRAWS)
def test_a_step_of_all_ranks_matches(draws: list[tuple[int, int]]) -> None:
    assert mismatches(step(draws)) == []


@given(DRAWS, st.data())
def test_a_call_that_is_missing_or_another_is_found(draws: list[tuple[int, int]], data: st.DataObject) -> None:
    calls = step(draws)
    rank = data.draw(st.sampled_from([rank for rank in range(4) if calls[rank]]))
    at = data.draw(st.integers(0, len(calls[rank]) - 1))
    kind, ranks, _ = calls[rank][at]
    calls[rank][at:at + 1] = data.draw(st.sampled_from([[], [(kind, ranks, (((8, 5), "bfloat16"),))], [(kind, ranks, (((8, 4), "float32"),))]]))
    assert len(mismatches(calls)) == 1


def test_two_collectives_in_another_order_are_told_with_both() -> None:
    calls: list[list[Call]] = [[("a", (0, 1), SHAPE), ("b", (0, 1), SHAPE)], [("b", (0, 1), SHAPE), ("a", (0, 1), SHAPE)]]
    (told,) = mismatches(calls)
    assert told.startswith("ranks (0, 1): call 0 of rank 1 is ('b'") and "of rank 0 ('a'" in told

"""What steps of lost lineages count as."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.groups import make_group, make_partial
from workers.coordinator.groups.lineage import Lineage
from workers.messages.arrays import Int32
from workers.messages.parts import Version

INCARNATIONS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6)
"""For each: how far it got, and how far back of the newest state of all the one after it begins."""


def test_only_steps_that_were_lost_count_as_older() -> None:
    lineage = Lineage({1: 0, 2: 5, 4: 3})
    versions = [Version(1, 4), Version(1, 7), Version(2, 4), Version(2, 9), Version(3, 2), Version(3, 7), Version(4, 9)]
    assert [lineage.step_of(version) for version in versions] == [3, 3, 3, 3, 2, 3, 9]
    assert [Lineage({1: 0, 2: 5}).step_of(version) for version in versions] == [4, 5, 4, 9, 2, 7, 9]


def test_the_pieces_of_a_group_count_each_for_itself() -> None:
    lineage = Lineage({1: 0, 2: 5})
    group = make_group("g0", 0, [4, 5, 7])
    rebased = lineage.rebase(group)
    assert rebased.steps.tolist() == [4, 5, 5] and type(rebased.steps) is Int32 and rebased.epochs.tolist() == [1, 1, 1]
    assert np.array_equal(rebased.logprobs, group.logprobs) and group.steps.tolist() == [4, 5, 7], "the original stays as it was"
    assert lineage.rebase(make_partial("g0", 0, [9], epoch=1)).steps.tolist() == [5]


def test_what_was_not_lost_stays_the_same_object() -> None:
    lineage = Lineage({1: 0, 2: 5})
    for piece in (make_group("g0", 0, [1, 5]), make_group("g0", 0, [8], epoch=2), make_partial("g0", 0, [], epoch=1)):
        assert lineage.rebase(piece) is piece


@given(INCARNATIONS)
def test_steps_count_as_the_last_one_that_both_histories_have_in_common(incarnations: list[tuple[int, int]]) -> None:
    """Compared with the histories themselves: each step of an incarnation is an object of its own, with those before it as its past."""
    lineage, past, histories = Lineage(), list[tuple[int, int]](), dict[tuple[int, int], list[tuple[int, int]]]()
    for epoch, (steps, back) in enumerate(incarnations, start=1):
        start = max(0, len(past) - 1 - back)
        lineage.forks[epoch] = start
        past = [*past[: start + 1], (epoch, start)] if not past else past[: start + 1]
        for step in range(start, start + steps + 1):
            if step > start:
                past = [*past[:step], (epoch, step)]
            histories[epoch, step] = list(past)
    now = histories[len(incarnations), max(step for epoch, step in histories if epoch == len(incarnations))]
    for (epoch, step), history in histories.items():
        common = sum(ours == theirs for ours, theirs in zip(now, history, strict=False)) - 1
        assert lineage.step_of(Version(epoch, step)) == common


@given(INCARNATIONS, st.integers(1, 6), st.integers(0, 30))
def test_counting_twice_changes_nothing(incarnations: list[tuple[int, int]], epoch: int, step: int) -> None:
    lineage = Lineage({number: back for number, (_, back) in enumerate(incarnations, start=1)})
    once = lineage.step_of(Version(epoch, step))
    assert lineage.step_of(Version(epoch, once)) == once <= step

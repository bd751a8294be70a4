"""The shared-prompt layout: which tokens stand where, what they cost, and that everything is there exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.trainer.batch.group import TrainGroup
from workers.trainer.batch.sequence_layout import PackedBatch, build_batch, pack_chunks, split_group, split_groups


def make_group(prompt: list[int], responses: list[list[int]]) -> TrainGroup:
    arrays = [np.array(response, dtype=np.int32) for response in responses]
    return TrainGroup(
        group_id="g", prompt=np.array(prompt, dtype=np.int32), responses=arrays,
        behavior_logprobs=[np.zeros(len(array), np.float32) for array in arrays],
        loss_mask=[np.ones(len(array), bool) for array in arrays], rewards=np.zeros(len(arrays), np.float32),
        versions=[np.zeros(len(array), np.int32) for array in arrays])


def pack_groups(groups: list[TrainGroup], indices: list[int], capacity: int, share: bool) -> list[PackedBatch]:
    return pack_chunks(groups, split_groups(groups, indices, capacity, share), capacity)


def context(batch: PackedBatch, position: int) -> list[int]:
    """The tokens that `position` attends to, itself included, in order."""
    return batch.tokens[places(batch, position)].tolist()


def places(batch: PackedBatch, position: int) -> list[int]:
    """Where they stand."""
    for branch in batch.branches:
        if branch.start <= position < branch.start + branch.length:
            return [*branch.context.tolist(), *range(branch.start, position + 1)]
    return list(range(max(start for start, _ in batch.trunks if start <= position), position + 1))


def test_layout_of_one_group() -> None:
    group = make_group([1, 2, 3], [[30, 31], [10, 11, 12, 13], [10, 11, 14, 15], [20], [10, 11, 12, 16]])
    (chunk,) = split_group(group, 0, 100, share_prompts=True)
    batch = build_batch([group], [chunk])
    assert batch.tokens.tolist() == [1, 2, 3, 10, 11, 12, 14, 30]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 5, 3]
    assert batch.trunks == [(0, 3)]
    assert [(branch.start, branch.length, branch.context.tolist()) for branch in batch.branches] == [
        (3, 3, [0, 1, 2]), (6, 1, [0, 1, 2, 3, 4]), (7, 1, [0, 1, 2])]
    assert batch.samples == [(0, 3), (0, 1), (0, 4), (0, 2), (0, 0)]
    assert batch.predict_at.tolist() == [2, 3, 4, 5, 6, 7]
    assert batch.predict_at[batch.predict_index].tolist() == [2, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3, 4, 6, 2, 7]
    assert batch.targets.tolist() == [20, 10, 11, 12, 13, 10, 11, 12, 16, 10, 11, 14, 15, 30, 31]
    assert chunk.cost == 8


GROUPS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=6),
              st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=6)),
    min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(GROUPS, st.integers(12, 40), st.booleans())
def test_every_token_is_predicted_from_its_own_context(specification: list, capacity: int, share: bool) -> None:
    groups = [make_group(prompt, responses) for prompt, responses in specification]
    assert_predicted(groups, capacity, share)


@settings(max_examples=100, deadline=None)
@given(GROUPS, st.integers(12, 40), st.booleans(), st.integers(0, 1000))
def test_every_token_goes_to_the_experts_that_it_went_to_and_so_does_its_context(specification: list, capacity: int, share: bool, seed: int) -> None:
    """Responses share only what went to the same experts: of two layers with three experts, of whom each token has two."""
    draw, groups = np.random.default_rng(seed), [make_group(prompt, responses) for prompt, responses in specification]
    for group in groups:
        usual = [np.array([[0, 1], [1, 2]], np.uint8)] * 3 + [np.array([[2, 0], [1, 0]], np.uint8)]
        group.routing = [np.stack([usual[draw.integers(4)] for _ in range(len(group.prompt) + len(response) - 1)]) for response in group.responses]
        if group.num_samples > 1:
            group.routing[1][: len(group.prompt)] = group.routing[0][: len(group.prompt)]
    for batch in assert_predicted(groups, capacity, share):
        assert batch.routing is not None and batch.routing.shape == (len(batch.tokens), 2, 2)
        number = 0
        for group_index, sample in batch.samples:
            group = groups[group_index]
            for length in range(len(group.responses[sample])):
                position = int(batch.predict_at[batch.predict_index[number]])
                told = group.routing[sample][: len(group.prompt) + length]  # type: ignore[index]
                assert np.array_equal(batch.routing[places(batch, position)].numpy(), told)
                number += 1


def test_what_fills_up_a_micro_batch_has_experts_too_and_their_numbers_may_take_two_bytes() -> None:
    group = make_group([1, 2], [[3, 4]])
    group.routing = [np.array([[[299, 7]], [[1, 2]], [[0, 258]]], np.uint16)]
    (batch,) = pack_chunks([group], split_groups([group], [0], 100, True), 100, multiple=4)
    assert batch.num_real == 3 and batch.routing is not None and batch.routing.tolist() == [[[299, 7]], [[1, 2]], [[0, 258]], [[0, 1]]]
    assert build_batch([group], [], 4).routing is None, "nothing is replayed where there is no sample"


def assert_predicted(groups: list[TrainGroup], capacity: int, share: bool) -> list[PackedBatch]:
    batches = pack_groups(groups, list(range(len(groups))), capacity, share)
    seen = sorted(sample for batch in batches for sample in batch.samples)
    assert seen == [(g, s) for g, group in enumerate(groups) for s in range(group.num_samples)]
    for batch in batches:
        assert len(batch.tokens) <= capacity
        number = 0
        for group_index, sample in batch.samples:
            group = groups[group_index]
            response = group.responses[sample].tolist()
            for k, token in enumerate(response):
                position = int(batch.predict_at[batch.predict_index[number]])
                assert context(batch, position) == group.prompt.tolist() + response[:k]
                assert int(batch.position_ids[position]) == len(group.prompt) + k - 1
                assert int(batch.targets[number]) == token
                number += 1
        assert number == len(batch.targets)
    return batches


def test_a_group_over_the_budget_is_split_and_copies_its_prompt() -> None:
    group = make_group([1, 2, 3, 4], [[10 + i, 50, 51, 52] for i in range(6)])
    chunks = split_group(group, 0, 12, share_prompts=True)
    assert [chunk.samples for chunk in chunks] == [(0, 1), (2, 3), (4, 5)]
    assert [chunk.cost for chunk in chunks] == [10, 10, 10]
    assert sum(len(batch.tokens) for batch in pack_groups([group], [0], 12, True)) == 30


def test_sharing_costs_prompt_plus_responses() -> None:
    group = make_group(list(range(23)), [[100 + i, 200 + i, 300 + i, 9] for i in range(16)])
    assert sum(chunk.cost for chunk in split_group(group, 0, 2048, True)) == 23 + 16 * 3
    assert sum(chunk.cost for chunk in split_group(group, 0, 2048, False)) == 16 * (23 + 3)


def test_long_responses_get_their_own_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.trainer.batch.sequence_layout.MAX_BRANCH_TOKENS", 4)
    group = make_group([1, 2], [[10, 11], [20, 21, 22, 23, 24, 25], [30, 31]])
    assert [(chunk.samples, chunk.cost) for chunk in split_group(group, 0, 100, True)] == [((1,), 7), ((0, 2), 4)]


def test_gather_and_scatter_are_inverse() -> None:
    groups = [make_group([1], [[2, 3], [4]]), make_group([5, 6], [[7, 8, 9]])]
    values = [[np.array([0.1, 0.2], np.float32), np.array([0.3], np.float32)], [np.array([0.4, 0.5, 0.6], np.float32)]]
    result: list[list[np.ndarray]] = [[np.empty(0, np.float32)] * group.num_samples for group in groups]
    for batch in pack_groups(groups, [0, 1], 4, True):
        batch.scatter(batch.gather(lambda group, sample: values[group][sample]), result)
    for expected, rows in zip(values, result, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(expected, rows, strict=True))


def test_one_response_over_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match=r"12 tokens.*budget of 8"):
        pack_groups([make_group([1, 2, 3], [list(range(10))])], [0], 8, True)

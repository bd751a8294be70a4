"""The advantages of a share of a batch: which rewards are compared, what a penalty does, and how often an episode counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.megatron_case import make_groups
from workers.algorithms.advantages import EPSILON
from workers.config import Advantage, AlgorithmConfig
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.objective import TokenValues
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.preparation import Actions, make_advantages, penalty_mean, second_moment_mask

pytestmark = pytest.mark.usefixtures("megatron_groups")


@pytest.fixture(autouse=True)
def alone() -> None:
    process_group.initialize()


def group_of(rewards: list[float], lengths: list[int], episodes: list[int] | None = None) -> TrainGroup:
    return TrainGroup(
        group_id="g", prompt=np.zeros(1, np.int32), responses=[np.zeros(length, np.int32) for length in lengths],
        behavior_logprobs=[np.zeros(length, np.float32) for length in lengths], loss_mask=[np.ones(length, np.bool_) for length in lengths],
        rewards=np.array(rewards, np.float32), versions=[np.zeros(length, np.int32) for length in lengths],
        episodes=None if episodes is None else np.array(episodes, np.int32))


def made(kind: Advantage, groups: list[TrainGroup], penalties: TokenValues | None = None) -> list[float]:
    """The advantage of each response's first token."""
    found = make_advantages(groups, AlgorithmConfig(advantage=kind), penalties)
    assert all(row.dtype == np.float32 for rows in found for row in rows)
    return [float(row[0]) for rows in found for row in rows]


THREE_OF_ONE = group_of([1.0, 1.0, 1.0, -1.0], [2, 2, 2, 2], [0, 0, 0, 1])
"""An episode with three responses, and one with one."""


@pytest.mark.parametrize(("kind", "expected"), [
    (Advantage.group_norm, [1.0, -1.0]), (Advantage.group_center, [1.0, -1.0]), (Advantage.leave_one_out, [2.0, -2.0])], ids=lambda value: str(value))
def test_an_episode_counts_once_in_its_group_and_its_responses_share_its_advantage(kind: Advantage, expected: list[float]) -> None:
    assert made(kind, [THREE_OF_ONE]) == pytest.approx([expected[0]] * 3 + [expected[1]], abs=1e-5)
    plain = group_of([1.0, 1.0, 1.0, -1.0], [2, 2, 2, 2])
    assert made(Advantage.group_norm, [plain]) == pytest.approx([3**-0.5] * 3 + [-(3**0.5)], abs=1e-5), "else every response counts"


def test_an_episode_counts_once_in_its_batch() -> None:
    other = group_of([3.0, 3.0], [1, 5])
    episodes = np.array([1.0, -1.0, 3.0, 3.0])
    one, two, three = (value / (episodes.std() + EPSILON) for value in (1.0 - episodes.mean(), -1.0 - episodes.mean(), 3.0 - episodes.mean()))
    assert made(Advantage.batch_norm, [THREE_OF_ONE, other]) == pytest.approx([one] * 3 + [two] + [three] * 2, rel=1e-5)
    centred = np.array([1.0, -1.0, 0.0, 0.0])
    wanted = (centred - centred.mean()) / (centred.std() + EPSILON)
    assert made(Advantage.reinforce_pp_baseline, [THREE_OF_ONE, other]) == pytest.approx([wanted[0]] * 3 + [wanted[1], 0, 0], abs=1e-5)


def test_an_episodes_penalty_is_that_of_all_its_responses() -> None:
    penalties = [[np.full(2, 0.25, np.float32)] * 3 + [np.zeros(2, np.float32)]]
    assert made(Advantage.group_center, [THREE_OF_ONE], penalties) == pytest.approx([(1 - 1.5 + 1) / 2] * 3 + [-(1 - 1.5 + 1) / 2])
    assert penalty_mean([THREE_OF_ONE], penalties) == pytest.approx(1.5 / 4)


def test_tokens_are_rewarded_to_the_end_of_their_response_and_normalised_over_all_tokens() -> None:
    groups = [group_of([1.0, -1.0], [2, 1]), group_of([2.0], [3])]
    groups[1].loss_mask[0][1] = False
    penalties = [[np.array([0.5, 0.25], np.float32), np.array([0.5], np.float32)], [np.array([0.0, 0.0, 1.0], np.float32)]]
    to_go = np.array([1 - 0.75, 1 - 0.25, -1 - 0.5, 2 - 1.0, 2 - 1.0])
    wanted = (to_go - to_go.mean()) / (to_go.std() + EPSILON)
    found = make_advantages(groups, AlgorithmConfig(advantage=Advantage.reinforce_pp), penalties)
    assert np.concatenate([row for rows in found for row in rows]).tolist() == pytest.approx([*wanted[:4], 0.0, wanted[4]], rel=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in Advantage if kind is not Advantage.gae], ids=lambda kind: kind.value)
def test_equal_rewards_say_nothing_and_a_share_may_be_empty(kind: Advantage) -> None:
    assert not any(made(kind, [group_of([0.1] * 3, [2, 1, 4]), group_of([0.1] * 2, [1, 1])]))
    if kind not in (Advantage.batch_norm, Advantage.reinforce_pp_baseline):  # these are of the batch, which is never empty
        assert make_advantages([], AlgorithmConfig(advantage=kind), None) == []


def test_a_leave_one_out_needs_another_one() -> None:
    with pytest.raises(ValueError, match="2 or more responses"):
        made(Advantage.leave_one_out, [group_of([1.0], [2])])


def test_actions_go_out_and_come_back() -> None:
    groups, rng = make_groups(3), np.random.default_rng(0)
    values = [[rng.normal(size=len(row)).astype(np.float32) for row in group.responses] for group in groups]
    actions = Actions(groups)
    back = actions.spread(actions.take(values))
    for group, rows, others in zip(groups, values, back, strict=True):
        for mask, row, other in zip(group.loss_mask, rows, others, strict=True):
            assert np.array_equal(other, np.where(mask, row, 0))
    assert int(actions.lengths.sum()) == sum(group.num_valid_tokens for group in groups)


def test_the_second_moment_looks_at_tokens_that_have_moved_where_they_were_pushed() -> None:
    group = group_of([1.0, -1.0], [3, 2])
    proximal = [[np.array([2.0, 0.1, -3.0], np.float32), np.array([3.0, -0.1], np.float32)]]
    advantages = [[np.ones(3, np.float32), -np.ones(2, np.float32)]]
    [kept] = second_moment_mask([group], proximal, advantages, limit=0.04)
    assert [row.tolist() for row in kept] == [[False, True, True], [True, True]]
    group.loss_mask[0][0] = False
    [kept] = second_moment_mask([group], proximal, advantages, limit=0.04)
    assert all(row.all() for row in kept), "what is no action counts for nothing"


def test_it_is_torch_all_the_way() -> None:
    assert Actions([group_of([1.0], [2])]).rewards(None).dtype is torch.float64

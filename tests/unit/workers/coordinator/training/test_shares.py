"""A batch divided among the copies of the model: all of it, once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.groups import make_group
from workers.config import Config
from workers.coordinator.training.batch_split import make_shares
from workers.messages.from_coordinator import Batch
from workers.messages.parts import Group

REWARDS = st.lists(st.sampled_from([-5.0, 0.25, 1.0, 5.0]), min_size=1, max_size=4)


def groups_of(rewards: list[list[float]]) -> list[Group]:
    return [make_group(f"g{index}", 0, [0] * len(values), rewards=values) for index, values in enumerate(rewards)]


def shares_of(groups: list[Group], num_minibatches: int, num_shares: int, step: int = 3) -> list[Batch]:
    config = Config()
    config.trainer.num_minibatches = num_minibatches
    return make_shares(config, step, groups, num_shares, 1.5)


@given(rewards=st.lists(REWARDS, min_size=1, max_size=8), num_minibatches=st.integers(1, 3), num_shares=st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_every_group_is_in_one_share_and_one_minibatch(rewards: list[list[float]], num_minibatches: int, num_shares: int) -> None:
    groups = groups_of(rewards)
    shares = shares_of(groups, num_minibatches, num_shares)
    assert [(share.step, share.share, share.num_shares, share.formed_at) for share in shares] == [(3, n, num_shares, 1.5) for n in range(num_shares)]
    own = [[group.group_id for group in share.groups] for share in shares]
    assert sorted(name for names in own for name in names) == [group.group_id for group in groups]
    assert all(names == sorted(names) for names in own), "in the order of the prompts"
    for share in shares:
        assert len(share.minibatches) == num_minibatches
        assert sorted(index for part in share.minibatches for index in part) == list(range(len(share.groups)))


def test_a_batch_is_divided_the_same_again_and_differently_at_another_step() -> None:
    groups = groups_of([[1.0, 0.25]] * 8)
    parts = [[share.minibatches for share in shares_of(groups, 2, 2, step)] for step in (3, 3, 4)]
    assert parts[0] == parts[1] != parts[2]

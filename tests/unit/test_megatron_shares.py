"""How a minibatch is divided among data-parallel ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tests.unit.megatron_case import make_groups
from workers.trainer.layout import pack_groups
from workers.trainer.packing import divide


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 9))
def test_every_item_is_in_one_share_and_shares_are_balanced(lengths: list[int], number: int) -> None:
    shares = divide(lengths, number)
    assert len(shares) == number
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    tokens = [sum(lengths[index] for index in share) for share in shares]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@given(st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_ranks_pass_every_sample_once(num_groups: int, ranks: int, share_prompts: bool) -> None:
    groups = make_groups(num_groups, seed=num_groups)
    shares = [pack_groups(groups, list(range(num_groups)), 40, share_prompts, rank, ranks) for rank in range(ranks)]
    samples = [sample for share in shares for batch in share for sample in batch.samples]
    assert sorted(samples) == [(group, sample) for group in range(num_groups) for sample in range(5)]


@pytest.mark.parametrize("rank", [0, 1])
def test_an_item_over_the_budget_is_refused_by_every_rank(rank: int) -> None:
    groups = make_groups(2)
    with pytest.raises(ValueError, match=r"more than the budget of 5 tokens.*trainer\.microbatch_tokens"):
        pack_groups(groups, [0, 1], 5, True, rank, 2)

"""Ages of what is consumed."""

from __future__ import annotations

import msgspec

from tests.support.groups import make_group
from workers.coordinator.groups.consumption import measure
from workers.messages.arrays import Bool, Float32, Int32


def test_the_mean_age_is_that_of_the_tokens_that_are_trained_on() -> None:
    """A long answer of a tool, between two turns, is as old as the turn before it, and no measure of the policy."""
    tools = msgspec.structs.replace(
        make_group(), lengths=Int32.of([250, 3]), tokens=Int32.of([3] * 253), logprobs=Float32.of([-0.5] * 253),
        loss_mask=Bool.of([True] * 5 + [False] * 225 + [True] * 20 + [True] * 3), epochs=Int32.of([1, 1, 1]), steps=Int32.of([2, 4, 5]),
        run_lengths=Int32.of([230, 20, 3]))
    ages = measure(5, [tools, make_group(steps=[1, 5])], 1000, 2000)
    assert (ages.tokens_trained, ages.max_token_age) == (30, 4)
    assert ages.mean_token_age == (5 * 3 + 20 * 1 + 3 * 0 + 4 + 0) / 30

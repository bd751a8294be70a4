"""Small groups for tests."""

from __future__ import annotations

from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.parts import Group, Partial, Purpose


def make_group(group_id: str = "g0", attempt: int = 0, steps: list[int] | None = None, *, rewards: list[float] | None = None,
               purpose: Purpose = Purpose.training, epoch: int = 1) -> Group:
    """One sample of one token for each entry of `steps`, sampled at that step. A training group has at least two samples: a single entry, and a
    single reward, are those of both."""
    size = 2 if purpose is Purpose.training else 1
    steps = [0] if steps is None else steps
    steps = steps * size if len(steps) == 1 else steps
    count = len(steps)
    values = rewards or [1.0]
    values = values * count if len(values) == 1 else values
    return Group(
        group_id=group_id, attempt=attempt, purpose=purpose, prompt_id="p", prompt=Int32.of([1, 2]), lengths=Int32.of([1] * count),
        tokens=Int32.of([3] * count), logprobs=Float32.of([-0.5] * count), loss_mask=Bool.of([True] * count),
        rewards=Float32.of(values), scores=Float32.of(values), epochs=Int32.of([epoch] * count), steps=Int32.of(steps),
        run_lengths=Int32.of([1] * count))


def make_partial(group_id: str = "g0", attempt: int = 0, steps: list[int] | None = None, *, epoch: int = 1) -> Partial:
    """One unfinished sample of one token for each entry of `steps`, sampled at that step, and one that has not been begun."""
    steps = [0] if steps is None else steps
    count = len(steps)
    return Partial(
        group_id=group_id, attempt=attempt, purpose=Purpose.training, lengths=Int32.of([1] * count + [0]), finished=Bool.of([False] * (count + 1)),
        tokens=Int32.of([3] * count), logprobs=Float32.of([-0.5] * count), epochs=Int32.of([epoch] * count), steps=Int32.of(steps),
        run_lengths=Int32.of([1] * count))

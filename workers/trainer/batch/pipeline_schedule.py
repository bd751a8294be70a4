"""How long pipeline stages wait for each other. Pure.

    stage 0   F0 F1 F2 .. B0 F3 B1 .. B2 B3        1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): forward passes until all stages have
    stage 1      F0 F1 B0 F2 B1 F3 B2 B3           work, then one backward pass after each forward pass
"""

from __future__ import annotations

from collections.abc import Sequence

BACKWARD = 2
"""Times a forward pass takes."""

MICROBATCHES_A_STAGE = 2


def fewest_microbatches(stages: int) -> int:
    """At least so many, if there are so many responses: with one for each stage, stages would wait for nearly half of the time."""
    return MICROBATCHES_A_STAGE * stages if stages > 1 else 1


def span(costs: Sequence[float], stages: int) -> float:
    """How long 1F1B takes for micro-batches whose forward pass through one of `stages` equal stages takes `costs`, in their unit."""
    orders = [_order(len(costs), stages - stage - 1) for stage in range(stages)]
    ends: dict[tuple[int, bool, int], float] = {}
    now, done = [0.0] * stages, [0] * stages
    while any(number < len(order) for number, order in zip(done, orders, strict=True)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                backward, item = order[done[stage]]
                begins = ends.get((stage + (1 if backward else -1), backward, item))
                if begins is None and stage != (stages - 1 if backward else 0):
                    break  # what comes from the other stage is not there yet
                now[stage] = max(now[stage], begins or 0.0) + costs[item] * (BACKWARD if backward else 1)
                ends[stage, backward, item] = now[stage]
                done[stage] += 1
    return max(now)


def _order(number: int, ahead: int) -> list[tuple[bool, int]]:
    """A stage's passes, as (backward, micro-batch), where `ahead` stages come behind it."""
    warm = min(ahead, number)
    steady = [step for item in range(number - warm) for step in ((False, warm + item), (True, item))]
    return [(False, item) for item in range(warm)] + steady + [(True, item) for item in range(number - warm, number)]

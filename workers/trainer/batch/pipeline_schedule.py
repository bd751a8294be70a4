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
    """At least so many, if there are so many responses, or groups that share their prompt: with one for each stage, stages would wait for nearly half
    of the time. Groups are not taken apart for it: their prompts would be computed again, which may cost more."""
    return MICROBATCHES_A_STAGE * stages if stages > 1 else 1


def passes_in_order(number: int, stages: int, pieces: int = 1) -> list[tuple[int, int]]:
    """The forward passes of a stage, as (micro-batch, piece of its part of the model). Interleaved stages (`pieces` > 1) take as many micro-batches
    as there are stages through each of their pieces in turn; backward passes come in the same order, from the last piece on."""
    if pieces == 1:
        return [(item, 0) for item in range(number)]
    return [(item, piece) for begin in range(0, number, stages) for piece in range(pieces) for item in range(begin, min(begin + stages, number))]


def span(costs: Sequence[float], stages: int, pieces: int = 1) -> float:
    """How long 1F1B takes for micro-batches whose forward pass through one of `stages` equal stages takes `costs`, in their unit, where each stage
    has `pieces` of the model (section 2.2 of that paper)."""
    orders = [_order(len(costs), stage, stages, pieces) for stage in range(stages)]
    ends: dict[tuple[int, bool, int], float] = {}
    now, done, last = [0.0] * stages, [0] * stages, stages * pieces - 1
    while any(number < len(order) for number, order in zip(done, orders, strict=True)):
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                backward, item, piece = order[done[stage]]
                place = piece * stages + stage
                begins = ends.get((place + (1 if backward else -1), backward, item))
                if begins is None and place != (last if backward else 0):
                    break  # what comes from the other stage is not there yet
                now[stage] = max(now[stage], begins or 0.0) + costs[item] / pieces * (BACKWARD if backward else 1)
                ends[place, backward, item] = now[stage]
                done[stage] += 1
    return max(now)


def most_ahead(stage: int, stages: int, pieces: int = 1) -> int:
    """How many forward passes through a piece a stage makes before its first backward pass: so many are kept besides the one that follows."""
    return stages - stage - 1 if pieces == 1 else 2 * (stages - stage - 1) + (pieces - 1) * stages


def _order(number: int, stage: int, stages: int, pieces: int) -> list[tuple[bool, int, int]]:
    """A stage's passes, as (backward, micro-batch, piece)."""
    forward = [(False, *one) for one in passes_in_order(number, stages, pieces)]
    backward = [(True, item, pieces - 1 - piece) for _, item, piece in forward]
    warm = min(most_ahead(stage, stages, pieces), len(forward))
    steady = [step for pair in zip(forward[warm:], backward, strict=False) for step in pair]
    return [*forward[:warm], *steady, *backward[len(forward) - warm:]]

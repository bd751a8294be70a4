"""The part of a micro-batch that one rank of a context-parallel group works on.

    packed tokens   | block 0 | block 1 | block 2 | block 3 |      2 * cp blocks of one size
    cp = 2            rank 0    rank 1    rank 1    rank 0         early tokens see few others, late ones many

A rank has its tokens' queries, and after an exchange everybody's keys and values. The part of a trunk or branch that lies within a
block is a branch again: it attends to what comes before it in its response. So nothing else has to know about blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.trainer.batch.sequence_layout import Branch, PackedBatch


@dataclass(frozen=True)
class RankPart:
    """The t tokens of one rank, of a micro-batch of T tokens that predicts N.

    `rows` int64 [t], ascending: which of the T tokens they are; `tokens`, `position_ids` int64 [t]; `trunks` and `branches`: what this
    rank's queries attend to, in the numbering of all T tokens. It predicts the tokens `selected` int64 [n] of the N, whose ids are
    `targets` int64 [n], from the rows `predict_at` int64 [u] of its own t; `predict_index` int64 [n] into those u.
    """

    rows: NDArray[np.int64]
    tokens: Tensor
    position_ids: Tensor
    trunks: list[tuple[int, int]]
    branches: list[Branch]
    predict_at: Tensor
    predict_index: Tensor
    targets: Tensor
    selected: Tensor


def part_of(batch: PackedBatch, rank: int = 0, size: int = 1) -> RankPart:
    """What rank `rank` of `size` has of `batch`, whose number of tokens is a multiple of 2 * `size` (of anything where `size` is 1)."""
    total = len(batch.tokens)
    if size == 1:
        return RankPart(np.arange(total), batch.tokens, batch.position_ids, batch.trunks, batch.branches, batch.predict_at,
                        batch.predict_index, batch.targets, torch.arange(len(batch.targets)))
    block = total // (2 * size)
    bounds = [(number * block, (number + 1) * block) for number in (rank, 2 * size - 1 - rank)]
    rows = np.concatenate([np.arange(low, high) for low, high in bounds])
    trunks, branches = _within(batch, bounds)
    taken = torch.from_numpy(rows)
    mine = torch.isin(batch.predict_at, taken)
    selected = mine[batch.predict_index].nonzero()[:, 0]
    renumbered = torch.cumsum(mine, 0) - 1
    return RankPart(rows, batch.tokens[taken], batch.position_ids[taken], trunks, branches,
                    torch.searchsorted(taken, batch.predict_at[mine]), renumbered[batch.predict_index[selected]], batch.targets[selected], selected)


def _within(batch: PackedBatch, bounds: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[Branch]]:
    """The parts of trunks and branches whose queries lie within `bounds`."""
    nothing = np.empty(0, np.int64)
    trunks: list[tuple[int, int]] = []
    branches: list[Branch] = []
    for segment in [*(Branch(start, length, nothing) for start, length in batch.trunks), *batch.branches]:
        for low, high in bounds:
            start, end = max(segment.start, low), min(segment.start + segment.length, high)
            if start >= end:
                continue
            context = np.concatenate([segment.context, np.arange(segment.start, start)])
            if context.size:
                branches.append(Branch(start, end - start, context))
            else:
                trunks.append((start, end - start))
    return trunks, branches

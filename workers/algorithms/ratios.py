"""Ratios of two policies' probabilities: of a token, or of the whole response that it is part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # exp() of a larger difference says no more than "impossible" and would overflow the sums

Level = Literal["token", "sequence", "geometric"]
"""What a ratio is of: a token; a response, the product over its tokens; the same to the power of 1 / length, their geometric mean."""

Add = Callable[[Tensor], Tensor]
"""Adds a tensor, element by element, over all who hold other parts of what it is the sum of; they call this together."""


def alone(part: Tensor) -> Tensor:
    """`Add` of one who holds everything."""
    return part


@dataclass(frozen=True)
class Responses:
    """The S responses that N tokens are of.

    `index` int64 [N], each token's response, from 0 to S - 1; `lengths` floating point [S], how many tokens each response has in whole that are
    trained on, wherever they are held (may be 0). `add` adds [S] over those who hold other tokens of the same responses.
    """

    index: Tensor
    lengths: Tensor
    add: Add = alone

    def sums(self, values: Tensor) -> Tensor:
        """Sums of `values` [N] over whole responses: [S], in double precision, without gradient."""
        return self.add(torch.zeros_like(self.lengths, dtype=torch.float64).index_add_(0, self.index, values.detach().double()))

    def token_lengths(self) -> Tensor:
        """The length of each token's response, at least 1: [N]."""
        return self.lengths.clamp(min=1)[self.index]


def log_ratio_at(level: Level, log_ratio: Tensor, responses: Responses | None) -> Tensor:
    """`log_ratio` [N], zero where a token does not count, at `level`: [N], each token having its response's.

    token: as it is. sequence: the sum over the response. geometric: that divided by the response's length (GSPO, arXiv 2507.18071, Eq. 7). The
    last two have no gradient. Raises ValueError where they are asked for without `responses`.
    """
    if level == "token":
        return log_ratio
    if responses is None:
        raise ValueError(f"ratios at level {level!r} need to know which response each token is of. Give `responses`")
    sums = responses.sums(log_ratio)
    if level == "geometric":
        sums = sums / responses.lengths.clamp(min=1)
    return sums.to(log_ratio.dtype)[responses.index]


def importance_ratio(current: Tensor, old: Tensor, level: Level = "token", responses: Responses | None = None) -> Tensor:
    """pi / pi_old of each token [N], from log-probs [N] that are equal where a token does not count; the gradient is that of `current`.

    token: u_t = pi(t) / pi_old(t). Else s_t = sg[s] pi(t) / sg[pi(t)] with s the response's ratio: GSPO-token (arXiv 2507.18071, Eq. 14), whose
    value is s at every token while each token carries its own gradient; no gradient passes a sum over tokens. Logarithms of ratios are bounded by
    `MAX_LOG_RATIO`; a token above it has no gradient at level token.
    """
    difference = current - old
    if level == "token":
        return difference.clamp(max=MAX_LOG_RATIO).exp()
    of_response = log_ratio_at(level, difference, responses).clamp(max=MAX_LOG_RATIO).exp()
    return of_response * (difference - difference.detach()).exp()

"""How long answers are: lognormal, cut off at the longest that is allowed. Pure.

Lengths of sampled answers are skewed to the right, and a group is done when its longest is: by how much that is longer than the mean says how many of
its samples still run on average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

POINTS, TOP = 400, 1 - 1e-12


@dataclass(frozen=True)
class Lengths:
    """Answers of `mean` tokens, at most `most`; `sigma`: of the logarithm, before the cut."""

    mean: float
    sigma: float
    most: int

    def longest(self, number: int) -> float:
        """Tokens of the longest of `number` answers, on average: over the quantiles of the largest, which are those of the `number`th root."""
        if self.sigma <= 0:
            return self.mean
        normal = NormalDist(self._middle(), self.sigma)
        levels = [((index + 0.5) / POINTS) ** (1 / number) for index in range(POINTS)]
        return sum(min(math.exp(normal.inv_cdf(min(level, TOP))), self.most) for level in levels) / POINTS

    def _middle(self) -> float:
        """The mean of the logarithm with which answers have their mean after the cut."""
        end, low, high = float(self.most), -5.0, math.log(self.most) + 5 * max(self.sigma, 0.1)
        if self.mean >= 0.999 * end:
            return high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_of_cut(middle, self.sigma, end) < self.mean else (low, middle)
        return low


def mean_of_cut(middle: float, sigma: float, end: float) -> float:
    """The mean of min(X, end) for a lognormal X."""
    if sigma <= 0:
        return min(math.exp(middle), end)
    unit, place = NormalDist(), (math.log(end) - middle) / sigma
    return math.exp(middle + sigma**2 / 2) * unit.cdf(place - sigma) + end * (1 - unit.cdf(place))

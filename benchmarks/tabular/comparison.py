"""Whether old samples cost anything, case by case, with intervals; corrected for how many cases are compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student_t
from torch import Tensor

LEVEL = 0.05


@dataclass(frozen=True)
class Cost:
    """Of a case against the same method with fresh samples: the difference of success (mean over seeds, which are paired), half of its 95%
    interval, and the probability of one as large by chance, by Student's t."""

    difference: float
    half: float
    p: float


def cost(fresh: Tensor, old: Tensor) -> Cost:
    """`fresh`, `old` [seeds]: means of success over the same steps."""
    differences = (old - fresh).tolist()
    number, mean = len(differences), sum(differences) / len(differences)
    error = math.sqrt(sum((each - mean) ** 2 for each in differences) / (number - 1) / number)
    freedom = number - 1
    p = 2 * float(student_t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Cost(mean, float(student_t.ppf(0.975, freedom)) * error, p)


def holm(ps: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Which of these hypotheses fall, so that all together are wrong at most with `level` (Holm, 1979)."""
    fallen = [False] * len(ps)
    for rank, index in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        if ps[index] > level / (len(ps) - rank):
            break
        fallen[index] = True
    return fallen

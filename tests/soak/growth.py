"""Whether a series is flat: by the median of all slopes between two of its points (Theil 1950, Sen 1968), which outliers do not move."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import theilslopes

MOST_POINTS = 400


@dataclass(frozen=True)
class Growth:
    """`first`, `last`: medians of the first and last tenth. `rise`: by the slope, over the whole time; `low`, `high`: 99 % interval of that."""

    first: float
    last: float
    rise: float
    low: float
    high: float

    def beyond(self, share: float, amount: float) -> bool:
        """Whether it has certainly grown, by more than this share of the first tenth and more than this amount."""
        return self.low > max(share * abs(self.first), amount)


def growth(times: list[float], values: list[float]) -> Growth:
    """Of `values` at `times` (increasing), without the first tenth, in which all is warming up. Raises ValueError for fewer than 20."""
    if len(values) < 20:
        raise ValueError(f"{len(values)} values: must be at least 20 to see a trend")
    x, y = np.asarray(times, float), np.asarray(values, float)
    tenth = len(y) // 10
    first, last, x, y = np.median(y[tenth:2 * tenth]), np.median(y[-tenth:]), x[tenth:], y[tenth:]
    bins = np.array_split(np.arange(len(x)), min(len(x), MOST_POINTS))  # all pairs of thousands would be too many
    slope, _, low, high = theilslopes([np.median(y[part]) for part in bins], [np.mean(x[part]) for part in bins], 0.99)
    span = float(x[-1] - x[0])
    return Growth(float(first), float(last), float(slope) * span, float(low) * span, float(high) * span)

"""Series of numbers out of the records of steps. Pure; what a record lacks, or what is no number in it, is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from launcher.report.record import number

Point = tuple[float, float]
Z = 1.959964
"""Of a 95% interval of the normal distribution."""


def values(records: Sequence[dict], key: str, x: str = "step") -> list[Point]:
    """(x, value) of every record that has both."""
    found = ((number(record.get(x)), number(record.get(key))) for record in records)
    return [(at, value) for at, value in found if at is not None and value is not None]


def increments(records: Sequence[dict], key: str) -> list[float]:
    """By how much a total grew in each record, the first one's since 0. A total that fell (the training job has started again) grew by nothing."""
    result, before = [], 0.0
    for record in records:
        value = number(record.get(key))
        result.append(0.0 if value is None else max(0.0, value - before))
        before = before if value is None else value
    return result


def rates(records: Sequence[dict], key: str) -> list[Point]:
    """(step, by how much a total grew in a second), from the second record on: the first one holds the start of the run."""
    seconds, grown = increments(records, "seconds"), increments(records, key)
    return [(step, grown[at] / seconds[at]) for at, record in enumerate(records)
            if at and seconds[at] > 0 and number(record.get(key)) is not None and (step := number(record.get("step"))) is not None]


def smooth(points: Sequence[Point], width: int) -> list[Point]:
    """The mean of the `width` values around each point; at the ends of as many as there are."""
    half, sums = width // 2, [0.0]
    for _, value in points:
        sums.append(sums[-1] + value)
    result = []
    for at, (x, _) in enumerate(points):
        reach = min(half, at, len(points) - 1 - at)  # as far to the left as to the right: a slope stays what it is
        result.append((x, (sums[at + reach + 1] - sums[at - reach]) / (2 * reach + 1)))
    return result


def thin(points: Sequence[Point], limit: int) -> list[Point]:
    """At most about `limit` points that look the same: of each stretch the lowest and the highest, in their order; and the ends."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(len(points) / max(1, limit // 2))
    result = [points[0]]
    for start in range(0, len(points), size):
        stretch = points[start:start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        result += sorted(ends)
    return [*result, points[-1]]


def wilson(share: float, count: float) -> tuple[float, float]:
    """The 95% score interval of a share of `count` (Wilson, JASA 1927). With scores between 0 and 1 it is on the safe side."""
    center, spread = share + Z * Z / (2 * count), Z * math.sqrt(max(0.0, share * (1 - share)) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


def words(value: float) -> str:
    """A number as short as it can be told: 0.125, 3.4, 12 300 as 12.3k, 2e-05."""
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.2g}"
    for least, scale, unit in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if size >= least:
            return f"{float(f'{value / scale:.3g}'):g}{unit}"
    return f"{value:.0f}" if size >= 100 or value == int(value) else f"{value:.3g}" if size >= 1 else f"{value:.3f}"

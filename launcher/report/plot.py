"""Charts as geometry: numbers in, coordinates and labels out, which templates/charts.html draws as SVG. Pure.

Own, and not matplotlib's: one page must follow the reader's dark or light screen and the printer, for which lines need classes and not
colours, and texts must stay texts; and a login node should not need 100 MB for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.report.series import Point, smooth, thin, words

MAX_POINTS = 240
MAX_HOVERS = 60
SMOOTH_FROM = 30
LABEL_GAP = 10.0


@dataclass(frozen=True)
class Trace:
    """One line. `tone`: number of its colour; `intervals`: (x, low, high); `dots`: its points are drawn, and never smoothed; `smoothed`: it is
    already. `end`: what stands at its end, instead of its last value and of its name in the legend."""

    name: str
    points: Sequence[Point]
    tone: int = 0
    intervals: Sequence[tuple[float, float, float]] = ()
    dots: bool = False
    smoothed: bool = False
    end: str = ""


@dataclass(frozen=True)
class Frame:
    """Where a chart draws, in pixels of its own: left, top, width and height of the area between the axes, and the whole."""

    left: float
    top: float
    width: float
    height: float
    total_width: float
    total_height: float


SMALL = Frame(38, 6, 248, 104, 330, 130)
WIDE = Frame(40, 14, 955, 150, 1000, 192)
HALF = Frame(44, 8, 390, 140, 490, 172)


@dataclass(frozen=True)
class Scale:
    """From values to pixels; `log`: by their logarithms."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value."""
        low, high, here = (math.log(number) for number in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return round(self.start + (here - low) / (high - low) * (self.end - self.start), 1)


@dataclass(frozen=True)
class Tick:
    """A line of the grid, with its label."""

    at: float
    text: str


@dataclass(frozen=True)
class Path:
    """A line or an area: SVG path data, and the classes that say how it looks."""

    d: str
    css: str


@dataclass(frozen=True)
class Label:
    """Text at a place, in a colour."""

    x: float
    y: float
    text: str
    css: str


@dataclass(frozen=True)
class Hover:
    """A stretch of the x axis that tells its values when pointed at."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Legend:
    """A name in the colour of its line."""

    name: str
    tone: int


@dataclass(frozen=True)
class Chart:
    """What templates/charts.html draws."""

    title: str
    note: str
    frame: Frame
    legend: list[Legend] = field(default_factory=list)
    x_ticks: list[Tick] = field(default_factory=list)
    y_ticks: list[Tick] = field(default_factory=list)
    marks: list[float] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    hovers: list[Hover] = field(default_factory=list)


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers between `low` and `high`, about `count` of them."""
    rough = (high - low) / max(1, count)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between `low` and `high`, at most four; the ends where there are fewer than two."""
    powers = [10.0 ** power for power in range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)]
    return powers[::math.ceil(len(powers) / 4)] if len(powers) >= 2 else [low, high]


def scale_of(numbers: Sequence[float], start: float, end: float, log: bool = False, room: float = 0.06) -> Scale:
    """A scale that shows all numbers; `log` counts only where they are positive and far apart."""
    low, high = min(numbers), max(numbers)
    if log and low > 0 and high / low >= 30:
        return Scale(low / 1.2, high * 1.2, start, end, log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low else (-0.1, 0.1)
    margin = (high - low) * room
    return Scale(low - margin if low else 0.0, high + margin, start, end)


def round_words(value: float) -> str:
    """A tick's number, without digits that say nothing: 0.5, 2000, 20k."""
    return f"{value:g}" if 1e-3 <= abs(value) < 1e4 else words(value)


def path_of(points: Sequence[Point], x: Scale, y: Scale) -> str:
    """SVG path data of a line through the points."""
    return "M" + " ".join(f"{x.at(at):g},{y.at(value):g}" for at, value in points)


def x_axis(scale: Scale, count: int, whole: bool) -> list[Tick]:
    """Ticks, at whole numbers alone where there is nothing between them."""
    return [Tick(scale.at(value), round_words(value)) for value in nice_ticks(scale.low, scale.high, count) if not whole or value == int(value)]


def line_chart(title: str, traces: Sequence[Trace], frame: Frame = SMALL, note: str = "", include: Sequence[float] = (), log: bool = False,
               marks: Sequence[float] = (), unit: str = "step") -> Chart | None:
    """Lines over steps, or another `unit`; None where there is nothing to draw. `include`: values that the y axis must show; `marks`: x of
    vertical lines."""
    drawn = [trace for trace in traces if trace.points]
    if not drawn:
        return None
    numbers = [value for trace in drawn for _, value in trace.points] + [end for trace in drawn for _, *ends in trace.intervals for end in ends]
    places = [at for trace in drawn for at, _ in trace.points]
    low, high = min(places), max(places)
    x = Scale(low, high if high > low else low + 1, frame.left, frame.left + frame.width)
    y = scale_of([*numbers, *include], frame.top + frame.height, frame.top, log)
    paths: list[Path] = []
    ends: list[Label] = []
    for trace in drawn:
        strong = _draw(trace, x, y, paths)
        ends.append(Label(frame.left + frame.width + 5, y.at(strong[-1][1]), trace.end or words(trace.points[-1][1]), f"tone{trace.tone}"))
    legend = [Legend(trace.name, trace.tone) for trace in drawn if trace.name and not trace.end]
    y_values = log_ticks(y.low, y.high) if y.log else nice_ticks(y.low, y.high, 4)
    below = Label(frame.left + frame.width + 16, frame.top + frame.height + 11, unit, "")
    return Chart(
        title, note, frame, legend, x_axis(x, 4 if frame is SMALL else 8, unit == "step"),
        [Tick(y.at(value), round_words(value)) for value in y_values], [x.at(at) for at in marks if x.low <= at <= x.high], paths,
        [*spread(ends, frame.top, frame.top + frame.height), below], hovers(drawn, x, unit))


def _draw(trace: Trace, x: Scale, y: Scale, paths: list[Path]) -> Sequence[Point]:
    """Add a trace's paths; returns the points of its strong line."""
    for at, low, high in trace.intervals:
        paths.append(Path(f"M{x.at(at):g},{y.at(low):g} V{y.at(high):g}", f"interval tone{trace.tone}"))
    if trace.dots:
        paths.append(Path(path_of(trace.points, x, y), f"line tone{trace.tone}"))
        paths.append(Path(" ".join(f"M{x.at(at):g},{y.at(value):g} h0" for at, value in trace.points), f"dots tone{trace.tone}"))
        return trace.points
    strong = trace.points
    if len(trace.points) >= SMOOTH_FROM and not trace.smoothed:
        strong = smooth(trace.points, smoothing(len(trace.points)))
        paths.append(Path(path_of(thin(trace.points, MAX_POINTS), x, y), f"raw tone{trace.tone}"))
    paths.append(Path(path_of(thin(strong, MAX_POINTS), x, y), f"line tone{trace.tone}"))
    if len(strong) == 1:
        paths.append(Path(f"{path_of(strong, x, y)} h0", f"dots tone{trace.tone}"))
    return strong


def smoothing(count: int) -> int:
    """Over how many of `count` points the strong line is a mean."""
    return max(5, count // 20) | 1


def spread(labels: Sequence[Label], top: float, bottom: float) -> list[Label]:
    """The labels moved apart so that none lies on another, as far as there is room."""
    placed: list[Label] = []
    for label in sorted(labels, key=lambda label: label.y):
        y = max(label.y, placed[-1].y + LABEL_GAP) if placed else max(label.y, top)
        placed.append(Label(label.x, y, label.text, label.css))
    for at in range(len(placed) - 1, -1, -1):
        limit = bottom if at == len(placed) - 1 else placed[at + 1].y - LABEL_GAP
        label = placed[at]
        placed[at] = Label(label.x, round(min(label.y, limit), 1), label.text, label.css)
    return placed


def hovers(traces: Sequence[Trace], x: Scale, unit: str) -> list[Hover]:
    """What is told where the reader points: the values of a step, or of a stretch of steps their means."""
    places = sorted({at for trace in traces for at, _ in trace.points})
    known = [(trace.name, dict(trace.points)) for trace in traces]
    size = math.ceil(len(places) / MAX_HOVERS)
    result = []
    for start in range(0, len(places), size):
        stretch = places[start:start + size]
        means = [(name, [points[at] for at in stretch if at in points]) for name, points in known]
        told = [f"{name} {words(sum(found) / len(found))}".strip() for name, found in means if found]
        before = x.at((places[start - 1] + stretch[0]) / 2) if start else x.start
        after = x.at((stretch[-1] + places[start + size]) / 2) if start + size < len(places) else x.end
        where = words(stretch[0]) if len(stretch) == 1 else f"{words(stretch[0])} to {words(stretch[-1])}, means"
        result.append(Hover(before, round(after - before, 1), f"{unit} {where}: {', '.join(told)}"))
    return result

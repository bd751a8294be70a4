"""How old what was trained on was: ages of all consumed groups as a histogram, and over the steps. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from launcher.report import plot
from launcher.report.curves import incarnation_steps
from launcher.report.plot import Chart, Frame, Label, Path, Tick, Trace
from launcher.report.record import Record, number
from launcher.report.series import values, words
from workers.config import Control

MAX_BARS = 40
FRAME = plot.HALF


@dataclass(frozen=True)
class Ages:
    """Ages of consumed groups, in steps; `eta`: the bound (None: not known)."""

    counts: Counter[int]
    eta: float | None

    @property
    def total(self) -> int:
        """Groups consumed."""
        return sum(self.counts.values())

    @property
    def stale(self) -> float:
        """Share that was begun under an older version than the one it trained."""
        return 1 - self.counts[0] / self.total if self.total else 0.0

    @property
    def beyond(self) -> float:
        """Share that was older than eta."""
        return 0.0 if self.eta is None or not self.total else sum(count for age, count in self.counts.items() if age > self.eta) / self.total


def ages(record: Record) -> Ages:
    """What the run has consumed so far."""
    counts: Counter[int] = Counter()
    for step in record.steps:
        histogram = step.get("staleness_histogram")
        if isinstance(histogram, dict):
            counts.update({int(age): int(count) for age, count in histogram.items() if age.isdecimal() and number(count) is not None})
    return Ages(counts, number(record.config.get("staleness.eta")))


def histogram(found: Ages) -> Chart | None:
    """Bars of the groups by age, what is older than eta in another colour; None without groups."""
    if not found.total:
        return None
    size = -(-(max(found.counts) + 1) // MAX_BARS)
    bars = Counter[int]()
    for age, count in found.counts.items():
        bars[age // size] += count
    num_bars = max(max(bars) + 1, min(int(found.eta or 0) // size + 1, MAX_BARS))
    frame, highest = FRAME, max(bars.values())
    width, y = frame.width / max(num_bars, 6), plot.scale_of([0.0, highest], frame.top + frame.height, frame.top + 12, room=0.0)
    paths, labels, ticks = [], [], []
    for bar in range(num_bars):
        left, top = frame.left + bar * width, y.at(bars[bar])
        late = found.eta is not None and bar * size > found.eta
        if bars[bar]:
            d = f"M{left + width * 0.1:.1f},{y.start:g} V{top:g} h{width * 0.8:.1f} V{y.start:g} Z"
            paths.append(Path(d, f"bar {'late' if late else 'tone0'}"))
        if num_bars <= 12 and bars[bar]:
            labels.append(Label(round(left + width / 2, 1), top - 4, f"{bars[bar] / found.total:.1%}", "middle"))
        if num_bars <= 20 or bar % 5 == 0:
            ticks.append(Tick(round(left + width / 2, 1), str(bar * size)))
    bound = _bound(found, frame, width, size)
    return Chart("Groups by age when they were trained on", f"steps, {words(found.total)} groups", frame, x_ticks=ticks,
                 y_ticks=[Tick(y.at(value), words(value)) for value in plot.nice_ticks(0, highest, 3)],
                 paths=[*paths, *bound.paths], labels=[*labels, *bound.labels])


@dataclass(frozen=True)
class _Drawn:
    paths: list[Path] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)


def _bound(found: Ages, frame: Frame, width: float, size: int) -> _Drawn:
    """The line behind the last age that eta allows."""
    at = 0.0 if found.eta is None else frame.left + (found.eta // size + 1) * width
    if found.eta is None or at > frame.left + frame.width:
        return _Drawn()
    place, css = (at - 4, "end bound") if at > frame.left + frame.width / 2 else (at + 4, "bound")
    return _Drawn([Path(f"M{at:.1f},{frame.top:g} V{frame.top + frame.height:g}", "line bound")],
                  [Label(round(place, 1), frame.top + 8, f"η = {words(found.eta)}", css)])


def over_steps(record: Record, eta: float | None) -> Chart | None:
    """Ages of groups and tokens over the steps, with eta as a line."""
    traces = [Trace("groups, mean", values(record.steps, "staleness_mean"), 0), Trace("tokens, mean", values(record.steps, "token_age_mean"), 2),
              Trace("oldest group", values(record.steps, "staleness_max"), 1)]
    if record.text("staleness.control") == Control.divergence.value:
        traces.append(Trace("lead", values(record.steps, "lead"), 3))
    chart = plot.line_chart("Age over the steps", traces, FRAME, "in steps", (0.0, *([] if eta is None else [eta])), marks=incarnation_steps(record))
    if chart is None or eta is None:
        return chart
    y = plot.scale_of([value for trace in traces for _, value in trace.points] + [0.0, eta], FRAME.top + FRAME.height, FRAME.top)
    *ends, unit = chart.labels
    ends = plot.spread([*ends, Label(FRAME.left + FRAME.width + 5, y.at(eta), f"η = {words(eta)}", "bound")], FRAME.top, FRAME.top + FRAME.height)
    bound = Path(f"M{FRAME.left:g},{y.at(eta):g} h{FRAME.width:g}", "line bound")
    return replace(chart, paths=[*chart.paths, bound], labels=[*ends, unit])

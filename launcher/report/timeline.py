"""Who waited for whom: what the trainer and the rollout workers did with their time, as shares over the run's seconds. Pure.

    trainer, a step        wait_batch_s | train_s | publish_s | checkpoint_s | export_s | heldout_s | the rest of its seconds
    rollout workers        growth of rollout_idle_s | of weight_update_s | the rest of replicas x seconds: generating, as far as the training job
                           did not just start again: what workers did then, or whether they were there, is not on record
    rewards                growth of reward_wait_s and reward_busy_s, over seconds: how many requests wait, how many processes work, on average

Columns are as wide as their steps took and as high as the shares, so that areas are time. The run's first step is counted from where its
trainer began to wait for a batch: before that everything starts, which may take longer than many steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.report import plot
from launcher.report.plot import Chart, Hover, Label, Legend, Path, Scale, Tick, Trace
from launcher.report.record import Record, number
from launcher.report.series import increments, words

MAX_COLUMNS = 240
SMALLEST = 0.0005
"""A smaller share is not shown."""
TRAINER = (("trains", "train_s"), ("waits for a batch", "wait_batch_s"), ("publishes weights", "publish_s"), ("saves checkpoints", "checkpoint_s"),
           ("exports the model", "export_s"), ("measures the held-out loss", "heldout_s"))
REST, STARTING = "anything else", "the training job starts again"
GENERATING, IDLE, UPDATING = "generate", "have nothing to do", "stand still for new weights"
TONES = {"trains": 0, GENERATING: 0, "waits for a batch": 1, IDLE: 1, "publishes weights": 2, UPDATING: 2, "saves checkpoints": 3,
         "exports the model": 4, "measures the held-out loss": 5, REST: 6, STARTING: 7}


@dataclass(frozen=True)
class Layer:
    """One way to spend time: its seconds in every step."""

    name: str
    seconds: list[float]

    @property
    def total(self) -> float:
        """Over the run."""
        return sum(self.seconds)


@dataclass(frozen=True)
class Share:
    """A layer's part of all the time, for the legend."""

    name: str
    tone: int
    seconds: float
    share: float


@dataclass(frozen=True)
class Lane:
    """What one part did: the chart and the sums."""

    chart: Chart
    shares: list[Share]


def begin(record: Record) -> float:
    """The second of the run at which the first step began."""
    if not record.steps:
        return 0.0
    first = record.steps[0]
    ended, took = number(first.get("seconds")) or 0.0, sum(max(0.0, number(first.get(field)) or 0.0) for _, field in TRAINER)
    return max(0.0, ended - took) if took else 0.0


def _seconds(record: Record) -> list[float]:
    """How long every step took."""
    grown = increments(record.steps, "seconds")
    return [max(0.0, grown[0] - begin(record)), *grown[1:]] if grown else []


def _firsts(record: Record) -> list[bool]:
    """Whether a step is the first of another incarnation than the first."""
    found = {life.claim.step + 1 for life in record.lives[1:]}
    return [step.get("step") in found for step in record.steps]


def trainer_layers(record: Record) -> list[Layer]:
    """The trainer's seconds in every step; what none of its metrics names is the rest, or the start of another incarnation."""
    seconds = _seconds(record)
    named = [Layer(name, [max(0.0, number(step.get(field)) or 0.0) for step in record.steps]) for name, field in TRAINER]
    rest = [max(0.0, seconds[at] - sum(layer.seconds[at] for layer in named)) for at in range(len(seconds))]
    starting = [value if first else 0.0 for value, first in zip(rest, _firsts(record), strict=True)]
    rest = [value - starting[at] for at, value in enumerate(rest)]
    return [layer for layer in (*named, Layer(REST, rest), Layer(STARTING, starting)) if layer.total > SMALLEST * sum(seconds)]


def rollout_layers(record: Record, num_replicas: int) -> list[Layer]:
    """The rollout workers' seconds in every step, added up; `num_replicas`: how many there are where the record does not say. In the first step of
    another incarnation their totals hold what they waited without one, which is no time of the run: what they did in that step is not known."""
    seconds, firsts = _seconds(record), _firsts(record)
    idle, updating = ([0.0 if first else value for value, first in zip(increments(record.steps, key), firsts, strict=True)]
                      for key in ("rollout_idle_s", "weight_update_s"))
    there = [(number(step.get("replicas")) if "replicas" in step else None) or float(num_replicas) for step in record.steps]
    idle = [min(value, seconds[at] * there[at]) for at, value in enumerate(idle)]
    updating = [min(value, seconds[at] * there[at] - idle[at]) for at, value in enumerate(updating)]
    left = [seconds[at] * there[at] - idle[at] - updating[at] for at in range(len(seconds))]
    start = next((layer.seconds for layer in trainer_layers(record) if layer.name == STARTING), [0.0] * len(seconds))
    starting = [min(value * there[at], left[at]) for at, value in enumerate(start)]
    generating = [value - starting[at] for at, value in enumerate(left)]
    return [Layer(GENERATING, generating), Layer(IDLE, idle), Layer(UPDATING, updating), *([Layer(STARTING, starting)] if any(starting) else [])]


def lane(title: str, layers: Sequence[Layer], record: Record) -> Lane | None:
    """The chart of a part's time; None where no time has passed."""
    ends = [number(step.get("seconds")) or 0.0 for step in record.steps]
    total = sum(layer.total for layer in layers)
    start = begin(record)
    if not ends or not total or ends[-1] <= start:
        return None
    frame = plot.WIDE
    x, y = Scale(start, ends[-1], frame.left, frame.left + frame.width), Scale(0.0, 1.0, frame.top + frame.height, frame.top)
    columns = _columns(ends, start)
    heights = [[sum(layer.seconds[first:last]) for layer in layers] for first, last in columns]
    heights = [[value / (sum(column) or 1.0) for value in column] for column in heights]
    edges = [start, *(ends[last - 1] for _, last in columns)]
    paths = [Path(_area(edges, heights, number, x, y), f"area tone{TONES[layer.name]}") for number, layer in enumerate(layers)]
    shares = [Share(layer.name, TONES[layer.name], layer.total, layer.total / total) for layer in layers]
    steps = [number(step.get("step")) or 0.0 for step in record.steps]
    hovers = [Hover(x.at(edges[at]), round(x.at(edges[at + 1]) - x.at(edges[at]), 1), _words(layers, heights[at], steps[first], steps[last - 1]))
              for at, (first, last) in enumerate(columns)]
    marks, labels = _epochs(record, start, ends, x)
    note = f"share of the time; the start, {_clock(start)}, is left out" if start else "share of the time"
    chart = Chart(title, note, frame, [Legend(share.name, share.tone) for share in shares],
                  [Tick(x.at(value), _clock(value)) for value in _clock_ticks(start, ends[-1])],
                  [Tick(y.at(share), f"{share:.0%}") for share in (0.0, 0.5, 1.0)], marks, paths, labels, hovers)
    return Lane(chart, shares)


def _columns(ends: Sequence[float], start: float) -> list[tuple[int, int]]:
    """Stretches of steps that are drawn as one: at most `MAX_COLUMNS`, of about the same time."""
    result, first = [], 0
    for last in range(1, len(ends) + 1):
        before = ends[first - 1] if first else start
        if last == len(ends) or (ends[last - 1] - before) * MAX_COLUMNS >= ends[-1] - start:
            result.append((first, last))
            first = last
    return result


def _area(edges: Sequence[float], heights: Sequence[Sequence[float]], layer: int, x: Scale, y: Scale) -> str:
    """The outline of a layer over those below it."""
    below = [y.at(sum(column[:layer])) for column in heights]
    above = [y.at(sum(column[:layer + 1])) for column in heights]
    forth = " ".join(f"V{top:g} H{x.at(right):g}" for top, right in zip(above, edges[1:], strict=True))
    back = " ".join(f"V{bottom:g} H{x.at(left):g}" for bottom, left in zip(reversed(below), reversed(edges[:-1]), strict=True))
    return f"M{x.at(edges[0]):g},{below[0]:g} {forth} {back} Z"


def _words(layers: Sequence[Layer], shares: Sequence[float], first: float, last: float) -> str:
    where = f"step {words(first)}" if first == last else f"steps {words(first)} to {words(last)}"
    return f"{where}: " + ", ".join(f"{layer.name} {share:.0%}" for layer, share in zip(layers, shares, strict=True) if share >= 0.005)


def _epochs(record: Record, start: float, ends: Sequence[float], x: Scale) -> tuple[list[float], list[Label]]:
    """Where later incarnations went on, with their numbers."""
    places = []
    for life in record.lives[1:]:
        done = sum((number(step.get("step")) or 0.0) <= life.claim.step for step in record.steps)
        places.append((x.at(ends[done - 1] if done else start), f"epoch {life.claim.epoch}"))
    shown = [places[at] for at in range(len(places)) if not at or places[at][0] - places[at - 1][0] > 40]
    return [at for at, _ in places], [Label(at, plot.WIDE.top - 7, text, "middle") for at, text in shown]


def _clock_ticks(start: float, end: float) -> list[float]:
    """At most nine round times."""
    sizes = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400]
    size = next((size for size in sizes if (end - start) / size <= 8), (end - start) / 8)
    first = math.ceil(start / size)
    return list(itertools.takewhile(lambda value: value <= end, (number * size for number in itertools.count(first))))


def _clock(seconds: float) -> str:
    hours, minutes, rest = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}h{minutes:02}" if hours else f"{minutes}m" + (f"{rest:02}" if rest else "") if minutes else f"{rest}s"


def rewards(record: Record) -> Chart | None:
    """Requests that wait for a verifier and reward processes at work, on average over each step; None where nothing was judged."""
    seconds, waited, worked = (increments(record.steps, key) for key in ("seconds", "reward_wait_s", "reward_busy_s"))
    steps = [number(step.get("step")) for step in record.steps]
    places = [(at, step) for at, step in enumerate(steps) if at and seconds[at] > 0 and step is not None]
    traces = [Trace(name, [(step, grown[at] / seconds[at]) for at, step in places], tone) for name, grown, tone in
              (("processes at work", worked, 0), ("requests that wait", waited, 1)) if any(grown)]
    return plot.line_chart("Rewards: at work and waiting, on average", traces, plot.HALF, include=(0.0,))

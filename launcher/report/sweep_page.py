"""The page of a sweep: its runs side by side, their curves in one chart each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.report import plot, table
from launcher.report.curves import LEARNING, SUPERVISED, UPDATES, Panel
from launcher.report.page import environment
from launcher.report.plot import Chart, Trace
from launcher.report.record import Record, read
from launcher.report.series import Point, rates, smooth, thin, values
from launcher.sweep import REPORT
from workers.run.files import write_atomic
from workers.run.folder import RunFolder, RunFolderError

NUM_TONES = 10


@dataclass(frozen=True)
class Column:
    """A column of the table of runs."""

    title: str
    numeric: bool


@dataclass(frozen=True)
class Run:
    """One run: its colour, what tells it from the others, and its cells."""

    tone: int
    label: str
    cells: list[str]


@dataclass(frozen=True)
class Section:
    """Charts under a heading."""

    name: str
    charts: list[Chart]


def overlay(title: str, found: Sequence[Sequence[Point]], frame: plot.Frame, note: str = "", include: Sequence[float] = (),
            log: bool = False, unit: str = "step") -> Chart | None:
    """The lines of all runs, by number; long ones smoothed, so that several can be told apart. None without any."""
    traces = []
    for index, points in enumerate(found):
        strong = smooth(points, plot.smoothing(len(points))) if len(points) >= plot.SMOOTH_FROM else list(points)
        traces.append(Trace(str(index + 1), thin(strong, plot.MAX_POINTS), index % NUM_TONES, smoothed=True, end=str(index + 1)))
    return plot.line_chart(title, traces, frame, note, include, log, unit=unit)


def _figure_name(records: Sequence[Record]) -> str:
    names = {record.figure_name for record in records}
    return names.pop() if len(names) == 1 else "held-out score"


def sections(records: Sequence[Record]) -> list[Section]:
    """What is compared: first what came out, then what happened on the way."""
    supervised = all(record.supervised for record in records)

    def panels(chosen: Sequence[Panel], frame: plot.Frame) -> list[Chart | None]:
        return [overlay(f"{panel.title}{f', {name}' if name else ''}", [values(record.steps, field) for record in records], frame, panel.note,
                        panel.include, panel.log) for panel in chosen for field, name in panel.fields.items()]

    heldout = overlay(_figure_name(records).capitalize(), [values(record.evaluations, record.figure) for record in records],
                      plot.HALF, "nats a token" if supervised else "", () if supervised else (0.0, 1.0))
    by_time = overlay(f"{'Loss' if supervised else 'Reward'} over time", [_over_time(record) for record in records], plot.HALF,
                      "minutes since each began", unit="min")
    first = SUPERVISED if supervised else LEARNING
    speed = [overlay(f"Tokens a second, {name}", [rates(record.steps, f"tokens_{name}") for record in records], plot.SMALL, include=(0.0,))
             for name in ("generated", "trained")]
    ages = [overlay(f"Age, {name}", [values(record.steps, key) for record in records], plot.SMALL, "in steps", (0.0,))
            for name, key in (("mean of groups", "staleness_mean"), ("oldest group", "staleness_max"), ("mean of tokens", "token_age_mean"))]
    grouped: list[tuple[str, list[Chart | None]]] = [
        ("Outcome", [heldout, *panels(first[:1], plot.HALF), *(panels(first[1:2], plot.HALF)), by_time]), ("Learning", panels(first[2:], plot.SMALL)),
        ("Updates", [] if supervised else panels(UPDATES, plot.SMALL)), ("Staleness", [] if supervised else ages), ("Throughput", speed)]
    found = [Section(name, [chart for chart in charts if chart is not None]) for name, charts in grouped]
    return [section for section in found if section.charts or section.name == "Outcome"]


def _over_time(record: Record) -> list[Point]:
    return [(seconds / 60, value) for seconds, value in values(record.steps, "loss" if record.supervised else "reward", x="seconds")]


def _numeric(name: str, lines: Sequence[dict]) -> bool:
    return all(isinstance(line[name], int | float | None) for line in lines)


def _short(keys: Sequence[str]) -> dict[str, str]:
    """Their last parts, where these tell them apart."""
    parts = [key.rpartition(".")[2] for key in keys]
    return {key: part if parts.count(part) == 1 else key for key, part in zip(keys, parts, strict=True)}


def render(folder: Path, runs: Sequence[RunFolder], now: float) -> str:
    """The page of the runs in `folder`; `now`: seconds since 1970. Raises `RunFolderError` where a run has no config to go by,
    and where all are evaluations, which have no curves."""
    records = [read(run, samples=False) for run in runs]
    if all(record.text("run.kind") == "evaluation" for record in records):
        raise RunFolderError(f"{folder}: evaluations alone have no curves that a page could show. Their table: headway report {folder}")
    keys, lines = table.rows(records, now)
    names = table.columns(keys)
    cells = [[table.cell(name, line[name]) for name in names] for line in lines]
    shown = [Run(index % NUM_TONES, ", ".join(f"{name}={line[key]}" for key, name in _short(keys).items()) or line["run"], cells[index])
             for index, line in enumerate(lines)]
    return environment().get_template("sweep.html").render(
        name=folder.absolute().name, path=folder.absolute(), made=time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now)), runs=shown, keys=keys,
        columns=[Column(table.heading(name), _numeric(name, lines)) for name in names], sections=sections(records),
        trouble=[f"{record.path.name}: {line}" for record in records for line in record.trouble])


def write(folder: Path, runs: Sequence[RunFolder]) -> Path:
    """Write the sweep's page; returns where. Raises as `render`, and `OSError`."""
    path = folder.absolute() / REPORT
    write_atomic(path, render(folder, runs, time.time()).encode())
    return path

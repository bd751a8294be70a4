"""The page of one run: what its record says, put into templates/run.html.

Everything that the templates print is escaped (Jinja2's autoescape), and nothing is exempt: no template says `safe`, nothing here makes
`Markup`. Prompts and answers of models are hostile text. What is escaped could still hide or reorder what is read, so control characters
and those that turn the direction of text are shown by their numbers. The page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.report import ages as staleness
from launcher.report import curves, timeline
from launcher.report.alarm_history import spans, words
from launcher.report.changes import Change, DefaultsError, changes, defaults
from launcher.report.comparison import compare
from launcher.report.heading import facts, figures, num_replicas
from launcher.report.plot import SMOOTH_FROM, smoothing
from launcher.report.record import Record, read
from launcher.rollouts import kept_rows
from launcher.views.visible_text import visible_text
from workers.run.files import write_atomic
from workers.run.folder import RunFolder, RunFolderError

if TYPE_CHECKING:
    from jinja2 import Environment

def visible(value: object) -> object:
    """Text as `visible_text` makes it; anything else as it is."""
    from markupsafe import Markup

    return visible_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def environment() -> Environment:
    """Jinja2 with the templates of the reports."""
    import jinja2

    return jinja2.Environment(loader=jinja2.PackageLoader("launcher.report"), autoescape=True, finalize=visible, undefined=jinja2.StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)


def render(record: Record, now: float) -> str:
    """The page of a run; `now`: seconds since 1970."""
    ages = staleness.ages(record)
    lanes = [timeline.lane("The trainer", timeline.trainer_layers(record), record)]
    if not record.supervised:
        lanes.append(timeline.lane("The rollout workers", timeline.rollout_layers(record, num_replicas(record)), record))
    differing, trouble = _changes(record)
    return environment().get_template("run.html").render(
        record=record, name=record.text("run.name") or record.path.name, made=time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(now)),
        figures=figures(record, ages, now), facts=facts(record), learning=curves.learning(record), updates=curves.updates(record),
        others=curves.others(record), smoothing=smoothing(len(record.steps)) if len(record.steps) >= SMOOTH_FROM else 0,
        ages=ages, staleness=[chart for chart in (staleness.histogram(ages), staleness.over_steps(record, ages.eta)) if chart is not None],
        throughput=[chart for chart in (*curves.throughput(record), timeline.rewards(record)) if chart is not None],
        lanes=[lane for lane in lanes if lane is not None], alarms=spans(record), alarm_words=words(record), comparison=compare(record),
        rollouts=bool(kept_rows.parts(record.path / "rollouts")), changes=differing, trouble=[*record.trouble, *trouble])


def _changes(record: Record) -> tuple[list[Change], list[str]]:
    try:
        return changes(record.config, defaults(record.text("run.kind"))), []
    except DefaultsError as error:
        return [], [str(error)]


def write(run: RunFolder) -> Path:
    """Write the run's report.html; returns where. Raises `RunFolderError` where there is nothing to report on, `OSError` where it
    cannot be written."""
    record = read(run)
    if record.text("run.kind") == "evaluation":
        raise RunFolderError(f"{run.path}: an evaluation alone trains nothing that a report could show. Its figures stand in "
                             f"{run.evaluation_result}, its answers in {run.samples}")
    write_atomic(run.report, render(record, time.time()).encode())
    return run.report

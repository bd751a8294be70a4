"""Alarms about training: from the records of its steps, when each begins and ends. A pure state machine.

    record of a step (a line of metrics.jsonl) --alarm_inputs.py--> figures --alarm_conditions.py--> condition: holds | over | in between
         holds for alarms.steps steps in a row --> begins            over for alarms.steps steps in a row --> ends

Invariant: the state depends on the records alone. Whoever goes on from a checkpoint rebuilds it from the metrics.jsonl of that checkpoint.

A step whose record lacks a figure is not judged by it: it neither counts nor breaks a row. So are the first `alarms.window` steps, and those in
which a critic warms up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.config import Config
from workers.coordinator.monitoring.alarm_conditions import Alarm, Comparison, alarms_of
from workers.coordinator.monitoring.alarm_inputs import History, NotJudged, figures_of


@dataclass
class Row:
    """One alarm's: for how many steps in a row its condition has held or been over; since when it holds; `active`: since when it is one."""

    held: int = 0
    over: int = 0
    since: int = 0
    active: int | None = None
    condition: str = ""


class Health:
    """All alarms of one run."""

    def __init__(self, config: Config) -> None:
        self._config, self._alarms, self._steps = config, alarms_of(config), config.alarms.steps
        self._rows = {name: Row() for name in self._alarms}
        self._history = History(config.alarms.window)
        self._before: Mapping[str, Any] = {}

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Go on after `records`. What is active already has `alarms.steps` more steps before it ends the run."""
        for record in records:
            self.step(record)
        for row in self._rows.values():
            if row.active is not None:
                row.held = 0

    def step(self, record: Mapping[str, Any]) -> list[str]:
        """Take the record of the next training step; returns a line for each alarm that begins or ends with it."""
        figures, self._before = figures_of(record, self._before, self._config), record
        if record["step"] <= self._config.algorithm.critic_warmup_steps:
            return []
        self._history.add(figures)
        changes = (self._judge(name, alarm, record["step"]) for name, alarm in self._alarms.items())
        return [line for line in changes if line]

    def _judge(self, name: str, alarm: Alarm, step: int) -> str:
        row, alternatives = self._rows[name], self._compare(alarm)
        if not alternatives:
            return ""
        holding = [comparisons for comparisons in alternatives if all(comparison.holds for comparison in comparisons)]
        over = all(any(comparison.over for comparison in comparisons) for comparisons in alternatives)
        row.held, row.over = row.held + 1 if holding else 0, row.over + 1 if over else 0
        if holding:
            row.condition = "; or ".join(", and ".join(map(str, comparisons)) for comparisons in holding)
        if row.held == 1:
            row.since = step
        if row.active is None and row.held >= self._steps:
            row.active = row.since
            return f"alarm {self._tell(name)}"
        if row.active is not None and row.over >= self._steps:
            began, row.active = row.active, None
            return f"alarm {name}, since step {began}: over"
        return ""

    def _compare(self, alarm: Alarm) -> list[list[Comparison]]:
        found = []
        for alternative in alarm.alternatives:
            try:
                found.append(alternative(self._history, self._config))
            except NotJudged:
                continue
        return found

    def _tell(self, name: str) -> str:
        row = self._rows[name]
        return f"{name}, since step {row.active}: {row.condition}. Remedy: {self._alarms[name].remedy}"

    @property
    def active(self) -> list[dict]:
        """The alarms that are active, oldest first: name, since (step), condition (as last seen), remedy."""
        rows = sorted(((row.active, name) for name, row in self._rows.items() if row.active is not None))
        return [{"name": name, "since": since, "condition": self._rows[name].condition, "remedy": self._alarms[name].remedy} for since, name in rows]

    @property
    def metrics(self) -> dict:
        """For the record of the step: how many alarms are active, and since which step each."""
        return {"alarms": len(self.active), "alarms_since": {alarm["name"]: alarm["since"] for alarm in self.active}}

    @property
    def cause(self) -> str:
        """Why the run must end; '' if it need not."""
        fatal = [name for name in self._config.alarms.stop if name in self._rows and self._rows[name].active is not None
                 and self._rows[name].held >= self._steps]
        return "" if not fatal else (f"alarm {self._tell(fatal[0])}. It ended the run because of alarms.stop; "
                                     "`headway resume RUN alarms.stop=[]` goes on from the last checkpoint")

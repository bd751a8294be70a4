"""When which alarm was active, from `alarms_since`, `alarms` and `alarm_changes` of metrics.jsonl (docs/metrics.md). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.report.record import Record, number


@dataclass(frozen=True)
class Span:
    """An alarm that was active from one step to another; `open`: still at the last step."""

    name: str
    first: float
    last: float
    open: bool


def spans(record: Record) -> list[Span]:
    """All of them, by when they began."""
    result: list[Span] = []
    active: dict[str, tuple[float, float]] = {}
    for line in record.steps:
        step = number(line.get("step")) or 0.0
        now = _active(line, step)
        result += [Span(name, *active.pop(name), open=False) for name in list(active) if name not in now]
        active |= {name: (since, step) for name, since in now.items()}
    result += [Span(name, first, last, open=True) for name, (first, last) in active.items()]
    return sorted(result, key=lambda span: (span.first, span.name))


def words(record: Record) -> list[str]:
    """What was said as alarms began and ended, with conditions and remedies."""
    return [f"step {number(line.get('step')) or 0:g}: {change}" for line in record.steps
            if isinstance(changes := line.get("alarm_changes"), list) for change in changes]


def _active(line: dict, step: float) -> dict[str, float]:
    """The alarms that are active at a step, and since which."""
    since = line.get("alarms_since")
    if not isinstance(since, dict):
        return {}
    return {str(name): step if (began := number(value)) is None else began for name, value in since.items()}

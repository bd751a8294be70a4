"""What the runs of benchmarks.time_to_accuracy come to. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.journal import Record
from benchmarks.quiet import QUIET
from benchmarks.staleness.figures import Mean


def cut(record: Record, step: int | None) -> Record:
    """The run as far as `step`; None: all of it."""
    number = sum(step is None or each <= step for each in record["steps"])
    return record | {name: record[name][:number] for name in ("steps", "seconds", "accuracy")}


def seconds_to(record: Record, target: float) -> float | None:
    """When the straight lines between a run's evaluated steps first reach `target`; None: they never do."""
    return _reached(record["seconds"], record["accuracy"], target)


def steps_to(record: Record, target: float) -> float | None:
    """The same in steps."""
    return _reached(record["steps"], record["accuracy"], target)


def _reached(places: Sequence[float], accuracy: Sequence[float], target: float) -> float | None:
    if accuracy[0] >= target:
        return float(places[0])
    for number in range(1, len(places)):
        before, after = accuracy[number - 1], accuracy[number]
        if after >= target:
            return places[number - 1] + (places[number] - places[number - 1]) * (target - before) / (after - before)
    return None


def step_s(record: Record) -> float:
    """Seconds a step, from the first weights that were kept to the last; with start-up where only one step's were."""
    first = min(1, len(record["steps"]) - 2)
    return (record["seconds"][-1] - record["seconds"][first]) / (record["steps"][-1] - record["steps"][first])


def line(record: Record, target: float) -> str:
    """A run in one line."""
    seconds, steps = seconds_to(record, target), steps_to(record, target)
    reached = "not reached" if seconds is None or steps is None else f"{seconds:.0f} s, step {steps:.1f}"
    curve = " ".join(f"{value:.3f}" for value in record["accuracy"])
    return (f"{record['system']:<18} seed {record['seed']}: accuracy {curve} by step {record['steps'][-1]}; {target:g}: {reached}; "
            f"{step_s(record):.2f} s a step, {record['wall_s']:.0f} s in all; others used {record['others_cores']:.2f} cores")


def report(records: Sequence[Record], fast: str, slow: str, led: str, peer: str, target: float) -> dict[str, Any]:
    """Print a table of systems; returns the last line. `fast`, `slow`, `led` and `peer` are names of systems; those without runs have no figures."""
    by_system: dict[str, list[Record]] = {}
    for record in records:
        by_system.setdefault(record["system"], []).append(record)
    figures = {name: _figures(runs, target) for name, runs in by_system.items()}
    print(f"\n| system | runs | accuracy at the end | seconds to {target:g} | steps to {target:g} | seconds a step |\n|---|---|---|---|---|---|")
    for name, each in figures.items():
        print(f"| {name} | {each['runs']} | {each['final']} after {each['last_step']} | {_told(each['seconds'])} | {_told(each['steps'])} "
              f"| {each['step_s']:.2f} |")

    def pairs(one: str, other: str) -> list[tuple[Record, Record]]:
        """Runs of both systems, of the seeds that both have."""
        return [(left, right) for left in by_system.get(one, []) for right in by_system.get(other, []) if left["seed"] == right["seed"]]

    def difference(name: str) -> str | None:
        """Accuracy at the end, of `name` less that of `slow`, by seed; None where they do not end with the same step."""
        ends = [(one, other) for one, other in pairs(name, slow) if one["steps"][-1] == other["steps"][-1]]
        return Mean.of([one["accuracy"][-1] - other["accuracy"][-1] for one, other in ends]).text(sign="+") if ends else None

    def as_good() -> dict[str, Any] | None:
        """Seconds to the best that the peer's runs came to, which may be less than `target`; None without a peer."""
        best = [(seconds_to(one, goal), seconds_to(other, goal)) for one, other in pairs(fast, peer) for goal in [max(other["accuracy"])]]
        value, against = (_mean([pair[side] for pair in best]) for side in (0, 1))
        return {"value": value, "against": against, "ratio": round(against / value, 3)} if value and against else None

    whole = times_as_long(pairs(peer, fast), target)
    return {
        "name": f"seconds to {target:g} held-out accuracy, {peer} over {fast}", "unit": "s",
        "value": _mean(figures.get(fast, {}).get("seconds", [])), "against": _mean(figures.get(peer, {}).get("seconds", [])),
        "ratio": None if whole is None or whole["bound"] else whole["ratio"], f"to what {peer} came to": as_good(),
        **{f"{one} over": {name: times_as_long(pairs(one, name), target) for name in figures if name != one}
           for one in (slow, led) if one in figures},
        f"accuracy at the end less that of {slow}": {name: difference(name) for name in figures if name != slow},
        "quiet": all(record["others_cores"] <= QUIET for record in records), "systems": figures}


def times_as_long(pairs: Sequence[tuple[Record, Record]], target: float) -> dict[str, Any] | None:
    """How many times as long the first of each pair took to `target` as the second: `ratio`, the geometric mean; `interval`, 95% by Student's t over
    logarithms (None for a single pair); `seeds`; `bound`: a run that did not reach it took longer than it lasted, so that the ratio is 'at least'
    that where one of the first did not, 'at most' where one of the second did not, and has no interval (None: all did). None without pairs,
    where both happened, or one was there from the start."""
    seconds = [(seconds_to(one, target), seconds_to(other, target)) for one, other in pairs]
    late = {side for pair in seconds for side, value in enumerate(pair) if value is None}
    logs = [math.log((one or left["seconds"][-1]) / (other or right["seconds"][-1]))
            for (one, other), (left, right) in zip(seconds, pairs, strict=True)] if all(0.0 not in pair for pair in seconds) else []
    if len(late) > 1 or not logs:
        return None
    mean, bound = Mean.of(logs), "at least" if 0 in late else "at most" if late else None
    interval = None if late or math.isnan(mean.half) else [round(math.exp(mean.value + side * mean.half), 3) for side in (-1, 1)]
    return {"bound": bound, "ratio": round(math.exp(mean.value), 3), "interval": interval, "seeds": len(logs)}


def _figures(runs: Sequence[Record], target: float) -> dict[str, Any]:
    return {
        "runs": len(runs), "final": Mean.of([record["accuracy"][-1] for record in runs]).text(), "last_step": max(run["steps"][-1] for run in runs),
        "first": round(statistics.mean(record["accuracy"][0] for record in runs), 4), "step_s": round(statistics.mean(map(step_s, runs)), 3),
        "seconds": [_rounded(seconds_to(record, target)) for record in runs], "steps": [_rounded(steps_to(record, target)) for record in runs]}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where there are none, or a run did not reach the target."""
    reached = [value for value in values if value is not None]
    return round(statistics.mean(reached), 1) if reached and len(reached) == len(values) else None


def _told(values: Sequence[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.0f}" for value in values)

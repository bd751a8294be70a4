"""What runs of benchmarks.time_to_accuracy come to."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.time_to_accuracy.figures import cut, line, report, seconds_to, step_s, steps_to, times_as_long


def record(system: str, seed: int, accuracy: list[float], seconds_a_step: float = 4.0, others: float = 0.0) -> dict[str, Any]:
    steps = [5 * number for number in range(len(accuracy))]
    return {"system": system, "seed": seed, "steps": steps, "seconds": [0.0, *(10 + seconds_a_step * step for step in steps[1:])],
            "accuracy": accuracy, "wall_s": 100.0, "others_cores": others}


@pytest.mark.parametrize(("accuracy", "step"), [
    ([0.3, 0.5, 0.7, 0.8], 12.5), ([0.3, 0.75, 0.7, 0.8], 5.0), ([0.8, 0.1], 0.0), ([0.3, 0.5, 0.74], None), ([0.25, 0.5, 0.5, 1.0], 12.5)])
def test_the_target_is_reached_between_two_evaluations(accuracy: list[float], step: float | None) -> None:
    one = record("fast", 1, accuracy)
    assert steps_to(one, 0.75) == (None if step is None else pytest.approx(step))
    assert ("not reached" in line(one, 0.75)) is (step is None)
    if step is not None and step >= 5:
        assert seconds_to(one, 0.75) == pytest.approx(10 + 4.0 * step), "start-up counts"


def test_a_run_counts_as_far_as_a_step() -> None:
    whole = record("fast", 1, [0.3, 0.5, 0.7, 0.8])
    short = cut(whole, 10)
    assert (short["steps"], short["seconds"], short["accuracy"]) == ([0, 5, 10], [0.0, 30.0, 50.0], [0.3, 0.5, 0.7])
    assert cut(whole, None) == cut(whole, 15) == cut(whole, 100) == whole and short["wall_s"] == whole["wall_s"]


def known_to_be(bound: str | None, ratio: float) -> dict[str, Any]:
    """Of one seed."""
    return {"bound": bound, "ratio": pytest.approx(ratio, abs=1e-3), "interval": None, "seeds": 1}


def test_ratios_are_of_the_seeds_that_both_have(capsys: pytest.CaptureFixture[str]) -> None:
    curve = [0.3, 0.5, 0.7, 0.8]
    records = [record("fast", 1, curve, 4.0), record("fast", 2, curve, 100.0), record("slow", 1, curve, 9.0),
               record("slow", 2, [0.3, 0.4, 0.7, 0.9], 9.0), record("led", 2, curve, 3.0), record("peer", 1, curve, 40.0, others=0.5)]
    last = report(records, "fast", "slow", "led", "peer", 0.75)
    assert last["ratio"] == pytest.approx(510 / 60, abs=1e-3) and last["against"] == 510
    assert last["value"] == pytest.approx((60 + 1260) / 2)
    both, logs = last["slow over"]["fast"], [math.log(122.5 / 60), math.log(111.25 / 1260)]
    assert both["ratio"] == pytest.approx(math.exp(sum(logs) / 2), abs=1e-3) and both["seeds"] == 2
    half = 12.7062 * abs(logs[0] - logs[1]) / 2  # Student's t of one degree of freedom
    assert both["interval"] == pytest.approx([math.exp(sum(logs) / 2 - half), math.exp(sum(logs) / 2 + half)], rel=1e-3, abs=1e-3)
    assert last["slow over"]["peer"] == known_to_be(None, 122.5 / 510)
    assert last["led over"]["slow"] == known_to_be(None, 47.5 / 111.25)
    assert last["led over"]["peer"] is None, "no seed that both have"
    differences = last["accuracy at the end less that of slow"]
    assert differences["fast"].startswith("-0.050 ±") and differences["peer"] == "+0.000" and not last["quiet"]
    assert last["systems"]["slow"]["step_s"] == pytest.approx(9.0) == step_s(records[2])
    assert "| peer | 1 | 0.800 after 15 | 510 | 12 |" in capsys.readouterr().out


def test_a_target_that_is_not_reached_has_no_ratio() -> None:
    last = report([record("fast", 1, [0.3, 0.4, 0.8]), record("slow", 1, [0.3, 0.6]), record("peer", 1, [0.3, 0.6], 20.0)],
                  "fast", "slow", "led", "peer", 0.75)
    assert last["ratio"] is None and last["against"] is None
    assert last["slow over"] == {"fast": known_to_be("at least", 30 / 47.5), "peer": None}
    fast, slow, there = record("fast", 1, [0.3, 0.4, 0.8]), record("slow", 1, [0.3, 0.6]), record("fast", 1, [0.8, 0.9])
    assert times_as_long([(fast, slow)], 0.75) == known_to_be("at most", 47.5 / 30) and times_as_long([(there, fast)], 0.75) is None
    assert last["to what peer came to"] == {"value": 40.0, "against": 110.0, "ratio": 2.75}
    assert last["accuracy at the end less that of slow"] == {"fast": None, "peer": "+0.000"}


def test_systems_without_runs_have_no_figures() -> None:
    last = report([record("led", 1, [0.3, 0.8]), record("slow", 1, [0.3, 0.8], 8.0)], "fast", "slow", "led", "peer", 0.75)
    assert (last["value"], last["against"], last["ratio"], last["to what peer came to"]) == (None, None, None, None)
    assert last["led over"]["slow"]["ratio"] < 1 < last["slow over"]["led"]["ratio"]

"""Benchmarks of weight updates, rewards and staleness bounds run, at their smallest, and what they print adds up; their figures are not judged."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.children import ROOT
from benchmarks.interruption.workload import Workload, most_gained
from workers.config import WeightsConfig
from workers.run.paths import MEMORY


def last_line(module: str, *options: str) -> dict[str, Any]:
    before = set(MEMORY.glob("headway-benchmark-*"))
    ended = subprocess.run([sys.executable, "-m", module, *options], cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert set(MEMORY.glob("headway-benchmark-*")) <= before, "left something in memory"
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.long  # what carries them: tests/wire/workers/transport/weights
def test_weights_reach_all_receivers_and_the_trainer_sends_no_more_than_fanout_copies() -> None:
    figures = last_line("benchmarks.weights", "--quick")
    assert figures["ratio"] == pytest.approx(figures["value"] / figures["against"], rel=0.01)
    assert [case["receivers"] for case in figures["cases"]] == [1, 3]
    fanout = WeightsConfig().fanout
    for case in figures["cases"]:
        # What a socket has sent is looked at while it lives: the end may be missed.
        assert 0.5 < case["lanes_egress_copies"] < case["receivers"] + 0.1, "every byte leaves once for each receiver at most"
        for security in ("digest", "curve"):
            # A little more than whole copies: digests and headers travel as well.
            assert min(fanout, case["receivers"]) <= case[f"{security}_egress_copies"] < min(fanout, case["receivers"]) + 0.1


@pytest.mark.long
def test_interruption_is_measured_against_waiting() -> None:
    figures = last_line("benchmarks.interruption", "--quick")
    assert figures["ratio"] == pytest.approx(figures["value"] / figures["against"], rel=0.01)
    assert set(figures["runs"]) == {"interrupt", "wait", "never"}
    assert figures["reprefilled_tokens"] > 0 and min(figures[part] for part in ("pause_s", "load_s", "first_token_s", "reprefill_s")) > 0


@pytest.mark.long
def test_loading_beside_decode_is_measured_against_standing_still() -> None:
    figures = last_line("benchmarks.interruption.swap", "--quick")
    assert set(figures["lost"]) == {f"{swap} {mode}" for swap in ("pause", "overlap") for mode in ("in_place", "retract")}
    assert 0 < figures["value"] < figures["against"] and figures["never_tokens_per_cpu_s"] > 0
    assert all(lost["load_s"] > 0 and lost["stretch"] >= 1 for lost in figures["lost"].values())


def test_what_the_recorder_costs_is_measured_in_one_run() -> None:
    figures = last_line("benchmarks.recorder", "--quick")
    assert figures["value"] > 0 < figures["against"] and 0 < figures["own"] < 1
    assert figures["interval"][0] <= figures["ratio"] <= figures["interval"][1]
    assert figures["steps"] > 8 and figures["bytes_per_message"] > 10


def test_what_one_coordinator_takes_is_measured_on_the_wire() -> None:
    figures = last_line("benchmarks.control_plane", "--quick")
    assert figures["refused"] == 0 and figures["groups"] > 20 and figures["steps"] > 4
    assert figures["acknowledged_p50_ms"] <= figures["acknowledged_p99_ms"] == figures["value"] <= figures["acknowledged_p100_ms"]
    assert figures["memory_mb"] > 10 and figures["cpu_ms_per_group"] > 0


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_there_is_nothing_to_compare_with_and_it_says_so() -> None:
    assert last_line("benchmarks.control_plane.ray_queue", "--quick") == {"name": "ray_queue", "skipped": "no Ray"}


def test_larger_fleets_are_simulated_around_the_real_coordinator() -> None:
    figures = last_line("benchmarks.scaling", "--quick")
    assert [(case["gpus"], case["batch"]) for case in figures["cases"]] == [(4, "grown"), (8, "grown")]
    assert all(0 < case["speed"] <= 1 and 0 < case["slots"] <= 1 and case["tokens_per_s"] > 0 for case in figures["cases"])
    assert figures["ratio"] == pytest.approx(figures["value"] / figures["against"], rel=0.01)


def test_waiting_costs_the_more_the_oftener_and_nothing_where_all_answers_end_together() -> None:
    often, seldom = (most_gained(Workload(16, 384, turns, vocab_size=10)) for turns in (1.0, 8.0))
    assert often > seldom > 1
    assert most_gained(Workload(1, 384, 4.0, vocab_size=10)) == pytest.approx(1.0)


def test_rewards_are_judged_beside_generation() -> None:
    figures = last_line("benchmarks.rewards", "--quick")
    assert figures["ratio"] == pytest.approx(figures["value"] / figures["against"], rel=0.01)
    assert {case["kind"] for case in figures["cases"]} | {text.split(":")[0] for text in figures["left_out"]} == {"number", "code"}
    for case in figures["cases"]:
        assert all(rate["per_s"] > 0 and 0 < rate["p50_ms"] <= rate["p99_ms"] for rate in case["rates"])
        assert case["groups"]["free_busy_s"] == 0 < min(case["groups"][f"{way}_busy_s"] for way in ("overlap", "after"))
    assert figures["agreement"]
    for source in figures["agreement"]:
        assert source["items"] == source["right_passed"] == source["wrong_failed"] > 0 and source["agreed"] == 1


@pytest.mark.long
@pytest.mark.parametrize("until", [None, 2])
def test_the_time_to_an_accuracy_is_that_of_a_run(until: int | None, tmp_path: Path) -> None:
    figures = last_line("benchmarks.time_to_accuracy", "--quick", "--out", str(tmp_path / "out"), *([f"--until={until}"] if until else []))
    [record] = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert record["steps"] == list(range(0, (until or 4) + 1, 2))
    assert record["seconds"] == sorted(set(record["seconds"])) and record["seconds"][-1] < record["wall_s"]
    assert len(record["accuracy"]) == len(record["steps"]) and not (tmp_path / "out" / "run").exists()
    assert set(figures["systems"]) == {"eta 4"} and figures["ratio"] is None


@pytest.mark.long  # the simulation: tests/unit/workers/coordinator/groups/test_concurrency.py
def test_bounds_are_compared_and_the_hard_one_holds() -> None:
    figures = last_line("benchmarks.bounds", "--quick")
    assert figures["ratio"] == pytest.approx(figures["value"] / figures["against"], rel=0.01)
    assert {(case["lengths"], case["bound"]) for case in figures["cases"]} == {
        (lengths, bound) for lengths in ("short", "lognormal", "long tail") for bound in ("admission", "hard")}
    for case in figures["cases"]:
        for ages in [part["head"] for part in (*case["fixed"].values(), case["auto"])]:
            assert ages["mean"] <= case["eta"] + 0.1, "admission bounds the mean"
            assert case["bound"] == "admission" or (ages["most"] <= case["eta"] and ages["over"] == 0)
        assert case["ratio"] > 0.5
    assert figures["targets"] and not figures["runs"]

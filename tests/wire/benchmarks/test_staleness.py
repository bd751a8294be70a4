"""The staleness benchmark at its smallest: samples are as old as they are meant to be, an interrupted command goes on, figures add up."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.children import ROOT
from benchmarks.staleness.figures import Mean, accuracy, against_fresh, between, course, course_table, steps_to, undisturbed
from benchmarks.staleness.run import behavior_version

pytestmark = pytest.mark.timeout(900)

SAME = 1e-4
"""Engine and trainer agree to this, in nats, on the log-probs of one version; measured: 1e-6."""


def quick(out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The last line, and what the runs left in their journal."""
    command = [sys.executable, "-m", "benchmarks.staleness", "--quick", "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1]), [json.loads(line) for line in (out / "runs.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("staleness")
    return out, quick(out)[1]


@pytest.mark.long
def test_every_batch_is_exactly_as_old_as_it_is_meant_to_be(first: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = first
    assert {(record["objective"], record["eta"]) for record in records} == {(name, eta) for name in ("ppo", "decoupled_ppo") for eta in "02"}
    for record in records:
        assert record["versions"] == ([0, 1, 2, 3] if record["eta"] == "0" else [0, 0, 0, 1]) and not record["diverged"]
        for step, (version, gap) in enumerate(zip(record["versions"], record["gaps"], strict=True)):
            assert (gap < SAME) is (version == step), f"step {step} says that version {version} sampled it, and its log-probs say otherwise"


@pytest.mark.long
def test_seeds_pair_until_versions_differ(first: tuple[Path, list[dict[str, Any]]]) -> None:
    _, records = first
    assert len({(record["accuracy"][0], record["rewards"][0]) for record in records}) == 1
    fresh = [record for record in records if record["eta"] == "0"]
    assert fresh[0]["rewards"] == pytest.approx(fresh[1]["rewards"]), "with one minibatch and fresh samples the objectives are one"


@pytest.mark.long
def test_an_interrupted_command_goes_on_where_it_was(first: tuple[Path, list[dict[str, Any]]]) -> None:
    out, records = first
    kept, lost = records[:-1], records[-1]
    (out / "runs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
    last, again = quick(out)
    assert again[:-1] == kept, "what is there is not run again"
    assert all(again[-1][key] == lost[key] for key in ("objective", "eta", "seed", "versions", "steps"))
    assert again[-1]["rewards"] == pytest.approx(lost["rewards"])
    assert (last["runs"], last["seeds"]) == (len(records), 1) and "ratio" in last
    pytest.importorskip("matplotlib")
    assert (out / "staleness.svg").read_text().startswith("<?xml")


@pytest.mark.long
def test_other_settings_need_another_folder(first: tuple[Path, list[dict[str, Any]]]) -> None:
    out, _ = first
    command = [sys.executable, "-m", "benchmarks.staleness", "--out", str(out), "--seeds", "1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1 and "Give another folder" in ended.stderr


@pytest.mark.parametrize(("step", "eta", "version"), [(0, 0, 0), (7, 0, 7), (0, 4, 0), (3, 4, 0), (9, 4, 5), (100, math.inf, 0)])
def test_the_version_that_samples_a_batch(step: int, eta: float, version: int) -> None:
    assert behavior_version(step, eta) == version


def test_means_intervals_and_pairs() -> None:
    def record(objective: str, eta: str, seed: int, *curve: float) -> dict[str, Any]:
        return {"objective": objective, "eta": eta, "seed": seed, "accuracy": list(curve), "steps": [10 * step for step in range(len(curve))]}

    records = [record("ppo", "0", 1, 0.0, 0.9), record("ppo", "0", 2, 0.0, 0.7), record("ppo", "4", 1, 0.0, 0.5), record("ppo", "4", 2, 0.0, 0.5),
               record("decoupled_ppo", "4", 2, 0.0, 0.6, 0.8)]
    mean = Mean.of([accuracy(one) for one in records[:2]])
    assert mean.value == pytest.approx(0.8) and mean.half == pytest.approx(12.7062 * 0.1)  # t with one degree of freedom
    difference, apart = against_fresh(records, "ppo", "4"), between(records, "4")
    assert difference is not None and difference.value == pytest.approx(-0.3) and difference.num == 2
    assert apart is not None and apart.value == pytest.approx(0.3) and apart.num == 1 and math.isnan(apart.half)
    assert against_fresh(records, "decoupled_ppo", "4") is None
    over = between(records, "4", course)
    assert over is not None and over.value == pytest.approx(0.7 - 0.5), "the start counts for nothing, every evaluation after it the same"
    assert course_table(records).splitlines()[-1].startswith("| 4 | 0.500 ± 0.000 | -0.300 ± 1.271 | 0.700 | - | +0.200")
    assert [steps_to(one, 0.7) for one in records] == [10, 10, None, None, 20]


def test_disturbed_speeds_count_only_where_there_are_no_others() -> None:
    speeds = [{"eta": "0", "others_cores": 0.0}, {"eta": "0", "others_cores": 1.3}, {"eta": "4", "others_cores": 1.3}]
    assert undisturbed(speeds, "0") == speeds[:1] and undisturbed(speeds, "4") == speeds[2:] and not undisturbed(speeds, "8")

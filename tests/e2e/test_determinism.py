"""At eta = 0 with one engine a run is a function of its seed: two are equal to the bit, also where one was killed and went on.

One that was drained is not: it goes on with its unfinished answers, and what it knows of their tokens is computed at once then, not one by one: the
last bits of log-probs are others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import START_S, LiveRun, headway, live_run
from workers.run.files import read_lines

SAME = ("staleness.eta=0", "run.target_accuracy=null", "run.num_steps=12", "evaluation.every_steps=4", "checkpoint.every_steps=2")
MOMENTS = {"seconds", "rewards_waiting", "held_back"}
"""Besides what ends in _s: how long something took, or how much waited when somebody looked, or by time."""
OF_PROCESSES = {"num_retries", "weight_updates", "weight_fetch_bytes", "num_tokens_compared", "logprob_gap_mean", "logprob_gap_max", "refused"}
"""What counts what processes have done: those of a resumed run begin again, lease again, and compare engine with trainer again."""


def told(run: LiveRun, besides: set[str]) -> dict[str, Any]:
    """All that a run has come to."""
    lines = [*read_lines(run.run.metrics), *read_lines(run.run.evaluations)]
    return {
        "metrics and evaluations": [{key: value for key, value in line.items() if not key.endswith("_s") and key not in MOMENTS | besides}
                                    for line in lines],
        "consumed": read_lines(run.run.consumed), "samples": read_lines(run.run.heldout_samples),
        "weights": {path.name: path.read_bytes() for path in run.run.final_model.glob("*.safetensors")}}


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["weights"]
    lines = zip(*(each.pop("metrics and evaluations") for each in (one, other)), strict=True)
    assert [(key, line.get(key), same.get(key)) for line, same in lines for key in line | same if line.get(key) != same.get(key)] == []
    assert [name for name in one if one[name] != other[name]] == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    with live_run(tmp_path_factory.mktemp("undisturbed") / "run", *SAME) as run:
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        yield run


@pytest.mark.long  # a run that was killed comes to the same, too: below
def test_two_runs_of_one_seed_are_equal_to_the_bit(undisturbed: LiveRun, tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *SAME) as run:
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        assert_equal(told(undisturbed, set()), told(run, set()))


@pytest.mark.long
def test_the_seed_decides(undisturbed: LiveRun, tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *SAME, "run.seed=7") as run:
        assert run.launcher.wait(START_S) == 0, run.output.read_text()
        assert told(run, set())["weights"] != told(undisturbed, set())["weights"]


def test_a_run_that_was_killed_and_went_on_is_equal_to_one_that_was_not(undisturbed: LiveRun, tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *SAME) as run:
        run.after_steps(3).process("train task").kill()
        run.launcher.wait(START_S)
        assert (run.run.ended() or {})["state"] == "failed"
        resumed = headway("resume", "--plain", str(run.run.path))
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert_equal(told(undisturbed, OF_PROCESSES), told(run, OF_PROCESSES))

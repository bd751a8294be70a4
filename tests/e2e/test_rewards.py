"""Runs whose verifiers are in elements of their own: one may be killed, and the last one may not. That these end with a drained run:
test_selftest. A judge that misbehaves."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from tests.e2e.runs import END_S, START_S, live_run, wait_for
from tests.e2e.test_faults import ENDLESS, NO_MODEL
from tests.support.endpoints.judge_server import ANSWERS, RAW, judge_server
from tests.support.processes import command_line
from workers.run.files import read_lines


def test_a_run_goes_on_with_the_elements_that_are_left_and_ends_with_the_last(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *ENDLESS, *NO_MODEL, "reward=array", "reward.num_elements=2") as run:
        def num_elements() -> int:
            return json.loads(run.run.status.read_bytes())["rewards"]["num_elements"]

        run.after_steps(2)
        wait_for("both elements", lambda: num_elements() == 2, START_S)
        run.process("reward task").kill()
        wait_for("word of the one that was lost", lambda: num_elements() == 1, END_S)
        run.after_steps(len(read_lines(run.run.metrics)) + 4)
        assert run.run.ended() is None
        (left,) = [process for process in run.look() if "workers.reward.pool.worker_process" in command_line(process)]
        element = left.parent()
        assert element is not None
        element.kill()
        outcome = wait_for("the outcome", run.run.ended, END_S)
        assert outcome["state"] == "failed" and "No reward element is left (reward.placement=array)" in outcome["cause"]
        run.assert_nothing_left()


def test_a_judge_that_misbehaves_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = itertools.cycle([*ANSWERS, *RAW, "huge", "drip", "hang", "packed", "429", "500", "404", "elsewhere"])
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    with (judge_server(lambda number, question: "Score: 5" if number < 32 or number % 2 == 0 else next(hostile)) as server, live_run(
            tmp_path / "run", *ENDLESS, *NO_MODEL, "+reward.parts.judge=0.25", f"reward.judge.url={server.url}", "reward.judge.model=any",
            "reward.judge.api_key_env=JUDGE_KEY", "reward.judge.timeout_s=2", "reward.judge.max_retries=0", "reward.judge.failed=0.25") as run):
        run.after_steps(4)
        wait_for("a failed question in the metrics", lambda: read_lines(run.run.metrics)[-1]["judge_failed"], END_S)
        last, shown = read_lines(run.run.metrics)[-1], json.loads(run.run.status.read_bytes())["rewards"]["judge"]
        assert 0 < last["score_judge"] <= 0.5 and 0 <= last["score_numeric_distance"] <= 1 and last["num_retries"] == last["num_set_aside"] == 0
        assert last["accuracy"] == pytest.approx(0.25 * last["score_judge"] + 0.75 * last["score_numeric_distance"], abs=1e-4)
        assert shown["failed"] and shown["error"].startswith("the judge gave no score: ")
        assert set(server.keys) == {"Bearer sk-very-secret"}
        written = [path for path in (*run.run.path.glob("*"), *run.run.path.glob("jobs/*"))
                   if path.suffix != ".tmp" and path.is_file()]
        assert len(written) > 6 and not [path for path in written if b"sk-very-secret" in path.read_bytes()]
        assert not [process for process in run.look() if "sk-very-secret" in command_line(process)]

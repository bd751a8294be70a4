"""Runs whose verifiers are in elements of their own: one may be killed, and the last one may not. That these end with a drained run:
test_selftest."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.runs import END_S, START_S, command_line, live_run, wait_for
from tests.e2e.test_faults import ENDLESS, NO_MODEL
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

"""A whole run of two training ranks, which both send their weights into the engines (weights.transport=nccl, over gloo), while one of these dies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.monitoring.stop import stop
from tests.e2e.runs import START_S, LiveRun, live_run, wait_for
from workers.run.files import read_lines

OVERRIDES = ("run.num_steps=1000000", "data.num_heldout=4", "evaluation.every_steps=0", "weights=nccl", "allocation.num_devices=4",
             "allocation.inference_fraction=0.5", "trainer.parallel.tp=2")


def steps(run: LiveRun) -> list[dict[str, Any]]:
    run.look()
    assert run.run.ended() is None, run.output.read_text()
    return read_lines(run.run.metrics)


def goes_to_both(run: LiveRun, since: int) -> bool:
    """Whether versions after step `since` have been broadcast, and both workers have got their last one so."""
    broadcast, status = any(step["broadcast_bytes"] for step in steps(run)[since:]), json.loads(run.run.status.read_bytes())
    ways = [worker["via"] for worker in status["workers"] if worker["name"].startswith("rollout")]
    return broadcast and status["weights"]["broadcast_to"] == 2 and ways == ["nccl", "nccl"]


@pytest.mark.long  # the same between real servers and ranks, and none of the run around them: tests/wire/workers/rollout/weights/test_broadcast.py
def test_weights_are_broadcast_again_after_an_engine_has_died(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *OVERRIDES) as run:
        run.after_steps(1)
        wait_for("broadcasts to both workers", lambda: goes_to_both(run, 0), START_S)
        run.process("engine").kill()
        wait_for("word of its restart", lambda: steps(run)[-1]["engine_restarts"], START_S)
        restarted = len(steps(run))
        wait_for("broadcasts to both again", lambda: goes_to_both(run, restarted), START_S)
        assert "stopped" in stop(run.run, "by the test")
        run.assert_nothing_left()

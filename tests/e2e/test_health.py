"""Alarms of a real run, whose rewards are all equal."""

from __future__ import annotations

import json
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.runs import START_S, headway, live_run
from tests.e2e.test_faults import NO_MODEL
from workers.run.files import read_lines

CONSTANT = ("reward.verifier=tests.support.hostile_verifiers:truth", "data.num_heldout=2", "evaluation.every_steps=0", "run.num_steps=8",
            "alarms.window=2", "alarms.steps=2", "alarms.off=[starving_trainer,idle_rollouts,stale_data]", "trainer.export_final=false", *NO_MODEL)
"""Every answer is right: no group has any spread. The alarms that depend on the speed of the machine are off."""


def test_equal_rewards_are_noticed_shown_and_may_end_the_run(tmp_path: Path) -> None:
    with live_run(tmp_path / "run", *CONSTANT, "alarms.stop=[equal_rewards]") as live:
        assert live.launcher.wait(START_S) == 1, live.output.read_text()
        live.assert_nothing_left()
    run = live.run
    outcome = run.ended() or {}
    assert outcome["state"] == "failed" and outcome["reported_by"] == "coordinator"
    begins = "alarm equal_rewards, since step 2: the share of groups whose rewards are all equal (mean score 1) is 1, above 0.9 (alarms.equal)"
    assert outcome["cause"].startswith(begins) and "alarms.stop" in outcome["cause"]
    assert "no end on record" not in run.report.read_text()
    assert [record["alarms"] for record in read_lines(run.metrics)][:3] == [0, 0, 1]
    done = headway("resume", "--plain", str(run.path), "alarms.stop=[]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert begins in done.stdout and begins in (run.jobs / "coordinator.log").read_text()
    steps, [alarm] = read_lines(run.metrics), json.loads(run.status.read_bytes())["alarms"]
    assert len(steps) == 8 and steps[-1]["alarms"] == 1 and steps[-1]["alarms_since"] == {"equal_rewards": 2}
    assert [record["step"] for record in steps if "alarm_changes" in record] == [3]
    assert alarm["name"] == "equal_rewards" and alarm["since"] == 2 and "harder prompts" in alarm["remedy"]
    shown = headway("status", str(run.path))
    assert "alarm equal_rewards, since step 2" in shown.stdout and "remedy: groups without spread teach nothing" in shown.stdout
    events = EventAccumulator(str(run.tensorboard))
    events.Reload()
    assert [event.value for event in events.Scalars("train/alarms")] == [0.0, 0.0, *[1.0] * 6]

"""What people see of a run, rendered: before the first step, with steps and evaluations, stale, ended."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from launcher.views.run_view import STALE_S, duration, eta, evaluation_line, histogram, panel, rates, step_line, summary_lines
from launcher.views.terminal import terminal

NOW = 1_700_000_000.0
WORKERS = [
    {"name": "rollout 0", "host": "node7", "pid": 4711, "version": "1.4", "fetching": "1.5", "waiting_for": "leases", "running": 3,
     "tokens_generated": 900, "silent_s": 0.4},
    {"name": "trainer 0", "host": "node8", "pid": 4712, "version": "", "fetching": "", "waiting_for": "", "running": 0,
     "tokens_generated": 0, "silent_s": 75.0}]


def status(**changes: Any) -> dict[str, Any]:
    return {"time": NOW - 1, "epoch": 1, "seconds": 125.0, "step": 4, "num_steps": 20, "eta": 4, "bound": "admission",
            "waiting": {"rollout": "the staleness bound", "trainer": "a batch: 3 of 8 groups"}, "buffer": 2, "running": 6, "admitted": 30,
            "set_aside": 1, "evaluating": "", "tokens_generated": 900, "tokens_trained": 600, "tokens_interrupted": 77, "refused_peers": 0,
            "malformed_messages": 0, "staleness": {"0": 12, "2": 28}, "workers": WORKERS, **changes}


def step(number: int, seconds: float, **changes: Any) -> dict[str, Any]:
    return {"step": number, "seconds": seconds, "reward": -1.25, "accuracy": 0.375, "staleness_mean": 1.5, "staleness_max": 3,
            "tokens_generated": 200 * number, "tokens_trained": 100 * number, "tokens_interrupted": 77, "buffer": 2, **changes}


def evaluation(number: int, accuracy: float, **changes: Any) -> dict[str, Any]:
    return {"step": number, "seconds": 9.0 * number, "accuracy": accuracy, "num_prompts": 200, "num_failed": 0, **changes}


STEPS = [step(number, 10.0 + 5 * number) for number in range(1, 5)]


def shown(state: dict[str, Any] | None, steps: list[dict[str, Any]] | None = None, evaluations: list[dict[str, Any]] | None = None,
          ended: dict[str, Any] | None = None, now: float = NOW, width: int = 140) -> str:
    """The panel as plain text, its white space made single."""
    console = Console(file=StringIO(), width=width, no_color=True)
    console.print(panel("run7", state, steps or [], evaluations or [], now, ended))
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def test_before_the_coordinator_is_there() -> None:
    assert "headway run7" in shown(None) and "waiting for the coordinator to start" in shown(None)
    assert "ended: the engine died" in shown(None, ended={"state": "failed", "cause": "the engine died"})
    complete = shown(None, ended={"state": "finished", "cause": ""})
    assert "ended: complete" in complete and "waiting" not in complete


def test_the_lead_stands_there_with_its_reason_where_something_moves_it() -> None:
    assert "lead 1.2 steps widened: mean 0.05 of 0.1 nats" in shown(status(lead=1.234, lead_reason="widened: mean 0.05 of 0.1 nats"))
    assert "lead" not in shown(status(lead=4.0, lead_reason=""))


def test_without_steps() -> None:
    text = shown(status(step=0, staleness={}))
    for part in ("headway run7", "step 0 of 20", "2m05s elapsed, ? left", "reward -", "held-out -", "eta 4 (admission) groups by age -",
                 "0.0 generated 0.0 trained", "77 kept across interruptions", "6 running 2 in the buffer 1 set aside"):
        assert part in text, part
    assert "ended" not in text and "has not written" not in text


def test_with_steps() -> None:
    text = shown(status(), STEPS)
    for part in ("step 4 of 20 2m05s elapsed, 1m20s left", "reward -1.250 sampled score 0.375", "groups by age 0: 12 2: 28",
                 "40.0 generated 20.0 trained"):
        assert part in text, part


def test_rejected_groups_are_shown_where_there_are_any() -> None:
    assert "1 set aside 12 rejected (31% of the latest)" in shown(status(rejected=12, share_rejected=0.3125))
    assert "rejected" not in shown(status(rejected=0, share_rejected=0.0)) and "rejected" not in shown(status())
    assert step_line(step(3, 1.0, groups_rejected=5, share_rejected=0.625)).endswith("buffer 2  rejected 62%")
    assert "rejected" not in step_line(step(3, 1.0, groups_rejected=0, share_rejected=0.0))


def test_the_workers() -> None:
    text = shown(status())
    assert "worker process weights of step running waits for" in text
    assert "rollout 0 node7:4711 4, fetches 5 3 the staleness bound" in text  # the coordinator knows what the leases wait for
    assert "trainer 0 node8:4712 0 a batch: 3 of 8 groups (silent 75 s)" in text
    assert text.count("silent") == 1
    assert "rollout 0 node7:4711 4, fetches 5 3 leases" in shown(status(waiting={"rollout": "", "trainer": ""}))
    busy = [{**WORKERS[0], "waiting_for": "weights", "fetching": ""}]
    assert "node7:4711 4 3 weights" in shown(status(workers=busy))  # a worker's own reason is the closer one
    assert "worker process" in shown(status(workers=[]))


def test_workers_at_which_groups_fail_are_named() -> None:
    said = shown(status(suspects=[f"rollout {number} on node{number}" for number in range(1, 4)]), width=200)
    assert "suspect rollout 1 on node1, rollout 2 on node2 and 1 more: groups fail there one after the other (headway logs RUN coordinator)" in said
    assert "suspect" not in shown(status())


def test_what_a_version_costs_and_what_has_failed_on_its_way() -> None:
    weights = {"transport": "zmq", "failed": {}, "num_updates": 4, "fetch_s": 1.25, "fetch_bytes": 270e6, "pause_s": 0.1, "load_s": 0.5,
               "num_fallbacks": 0, "num_refetched": 0, "loading": [], "waiting_to_load": []}
    assert "weights" not in shown(status(weights={**weights, "num_updates": 0}, workers=[])).replace("worker process weights of step", "")
    text = shown(status(weights=weights))
    assert "by zmq a version takes 1.25 s to arrive (270.0 MB), 0.10 s to pause, 0.50 s to load" in text and "wrong" not in text
    text = shown(status(weights={**weights, "num_refetched": 3, "num_fallbacks": 2, "failed": {"zmq": "rollout 1 on node3: no route"}}), width=200)
    assert "3 chunks came wrong and were fetched elsewhere" in text
    assert "zmq has failed, 2 versions came otherwise: rollout 1 on node3: no route" in text
    assert "node7:4711 4 (by disk), fetches 5 3" in shown(status(workers=[{**WORKERS[0], "via": "disk"}]))


def test_with_evaluations() -> None:
    text = shown(status(evaluating="17/200 at step 4"), STEPS, [evaluation(number, number / 10) for number in range(6)])
    assert "held-out 0.200 (step 2) 0.300 (step 3) 0.400 (step 4) 0.500 (step 5) evaluating 17/200 at step 4" in text
    assert "(step 1)" not in text  # the last four are enough
    assert "held-out - evaluating 3/200 at step 0" in shown(status(evaluating="3/200 at step 0"))


def test_stale_and_ended() -> None:
    assert "has not written" not in shown(status(time=NOW - STALE_S))
    assert "the coordinator has not written its status for 61 s" in shown(status(time=NOW - 61), STEPS)
    ended = shown(status(time=NOW - 61), STEPS, ended={"state": "failed", "cause": "worker rollout 0 has not answered"})
    assert "ended: worker rollout 0 has not answered" in ended and "has not written" not in ended
    assert "ended: complete" in shown(status(), STEPS, ended={"state": "finished", "cause": ""})


@pytest.mark.parametrize("text", ["[bold]loud[/bold]", "a list[int] of [/red] things", "[/]"])
def test_words_from_elsewhere_are_shown_as_they_are(text: str) -> None:
    """Square brackets are markup to rich; causes and waits come from other programs."""
    assert text in shown(status(), ended={"state": "failed", "cause": text})
    assert text in shown(None, ended={"state": "failed", "cause": text})
    assert text in shown(status(waiting={"rollout": text, "trainer": ""}))


@pytest.mark.parametrize("width", [20, 40, 300])
def test_every_width_renders(width: int) -> None:
    text = shown(status(), STEPS, [evaluation(0, 0.5)], width=width)
    assert "headway" in text and len(text) > 100


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0s"), (0.9, "0s"), (12.7, "12s"), (59.99, "59s"), (60, "1m00s"), (245, "4m05s"), (3599, "59m59s"), (3600, "1h00m"), (7385, "2h03m"),
    (360000, "100h00m"), (-5, "0s")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_time_left() -> None:
    assert eta(status(), []) == eta(status(), STEPS[:1]) == "?"
    assert eta(status(), STEPS) == "1m20s"  # 16 steps of 5 s
    assert eta(status(num_steps=4), STEPS) == "0s"
    slow_start = [step(1, 1000.0), *(step(number, 1000.0 + 2 * number) for number in range(2, 14))]
    assert eta(status(), slow_start) == "14s"  # 7 steps, at the pace of the last ten only
    assert eta(status(), [step(1, 7.0), step(2, 7.0)]) == "0s"


def test_rates() -> None:
    assert rates([]) == rates(STEPS[:1]) == (0.0, 0.0)
    assert rates(STEPS) == pytest.approx((40.0, 20.0))
    early = [step(1, 1.0, tokens_generated=0, tokens_trained=0)]
    assert rates([*early, *(step(number, 500.0 + number) for number in range(2, 13))]) == pytest.approx((200.0, 100.0))
    same = rates([step(1, 7.0), step(2, 7.0)])
    assert all(rate >= 0 for rate in same)


def test_lines() -> None:
    line = step_line(step(3, 75.0, behavior_weight_mean=1.0123, clip_share=0.05, entropy=2.5, grad_norm=0.333))
    for part in ("step    3", "1m15s", "reward -1.25", "sampled score 0.375", "age mean 1.5 max 3", "w 1.012", "clip 0.050", "entropy 2.500",
                 "grad 0.33", "tokens 600 generated 300 trained 77 interrupted", "buffer 2"):
        assert part in line, part
    assert "\n" not in line and "w 1.000" in step_line(step(3, 75.0))
    assert evaluation_line(evaluation(6, 0.4567)) == "held-out accuracy after step 6: 0.457 (200 prompts, greedy)"
    assert evaluation_line(evaluation(6, 0.5, num_failed=2)).endswith("(200 prompts, greedy, 2 could not be judged)")
    assert histogram({"0": 12, "1": 40}) == "0: 12  1: 40" and histogram({}) == ""


def test_summary() -> None:
    summary = {"heldout_before": 0.125, "heldout_after": 0.75, "heldout_prompts": 200, "num_steps": 20, "seconds": 245.0, "eta": 4,
               "bound": "hard", "staleness_histogram": {"0": 3, "4": 1}, "max_staleness": 4, "share_stale": 0.25, "tokens_generated": 9000,
               "tokens_trained": 8000}
    text = "\n".join(summary_lines(json.loads(json.dumps(summary))))
    for part in ("held-out accuracy 0.125 -> 0.750 on 200 prompts", "in 20 steps and 4m05s", "eta 4 (hard)", "0: 3  4: 1", "oldest 4", "25% begun",
                 "9000 generated, 8000 trained"):
        assert part in text, part
    assert "8000 trained; 7 groups rejected" in summary_lines({**summary, "num_rejected": 7})[2] and "rejected" not in text
    assert "held-out accuracy - -> -" in summary_lines({**summary, "heldout_before": None, "heldout_after": None})[0]


def test_what_is_no_accuracy_is_not_called_one() -> None:
    graded = evaluation(6, 0.341, graded=True, num_samples=1, **{"pass": {"1": {"mean": 0.05}}, "maj": None})
    assert evaluation_line(graded) == "held-out score after step 6: 0.341, pass@1 0.050 (200 prompts, greedy)"
    assert evaluation_line({**graded, "graded": False}) == "held-out accuracy after step 6: 0.341 (200 prompts, greedy)"
    several = evaluation(6, 0.3, graded=True, num_samples=4, temperature=1.0, **{"pass": {"1": {"mean": 0.1}, "4": {"mean": 0.2}}, "maj": None})
    assert "score after step 6: 0.300, pass@1 0.100, pass@4 0.200 (200 prompts, mean of 4" in evaluation_line(several)
    assert "accuracy" not in evaluation_line({**several, "pass": {"1": {"mean": 0.1}}})


def test_what_judging_takes_is_told_a_request() -> None:
    rewards = {"placement": "node", "num_elements": 0, "waiting": 3, "wait_s": 3061.0, "busy_s": 120.0, "num_killed": 0, "num_failed": 0,
               "num_late": 0, "num_done": 400}
    text = shown(status(rewards=rewards))
    assert "rewards 3 waiting a request takes 0.3 s and waits 7.7 s (means of 400)" in text and "51m" not in text and "in time" not in text
    hung = shown(status(rewards={**rewards, "num_done": 0, "num_late": 12, "num_killed": 12, "num_failed": 4}), width=200)
    assert "3 waiting none judged yet 12 times no answer in time (reward.timeout_s) 12 processes replaced 4 requests without an answer" in hung


def test_many_alarms_are_counted() -> None:
    alarms = [{"name": f"alarm_{number}", "since": number, "condition": f"condition {number}", "remedy": f"remedy {number}"} for number in range(5)]
    text = shown(status(alarms=alarms))
    assert "alarm alarm_1, since step 1: condition 1 remedy: remedy 1 3 more: alarm_2, alarm_3, alarm_4 (docs/health.md" in text
    assert "condition 2" not in text and "more" not in shown(status(alarms=alarms[:2]))


def role(**changes: Any) -> dict[str, Any]:
    return {"running": [], "pending": 0, "reasons": {}, "next": "", "starts": None, "done": 0, "failed": 0, **changes}


def running(element: str = "12_0", state: str = "RUNNING", *nodes: str, left: float = 725.0) -> dict[str, Any]:
    return {"element": element, "state": state, "nodes": list(nodes or ("trn0",)), "time_left_s": left}


def slurm(train: dict[str, Any] | None = None, inference: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    hours = {"used": 12.345, "wasted": 0.5, "train": 3.0, "inference": 9.345, "unit": "GPU-hours"}
    return {"roles": {"train": train or role(running=[running()]), "inference": inference or role()}, "hours": hours, "lives": [],
            "checkpoint": None, "no_accounting": "", **changes}


def shown_on_slurm(state: dict[str, Any] | None, figures: dict[str, Any], ended: dict[str, Any] | None = None) -> str:
    console = Console(file=StringIO(), width=180, no_color=True)
    console.print(panel("run7", state, STEPS if state else [], [], NOW, ended, figures))
    assert isinstance(console.file, StringIO)
    return " ".join(console.file.getvalue().replace("│", " ").split())


def test_a_run_on_slurm() -> None:
    inference = role(running=[running("11_0", "RUNNING", "inf0"), running("11_1", "RUNNING", "inf1", left=60)], pending=6,
                     reasons={"JobArrayTaskLimit": 6}, done=3, failed=1)
    workers = [{**WORKERS[0], "job": "11_0", "draining": True}]
    text = shown_on_slurm(status(checkpoint={"step": 3, "age_s": 61.0}, replicas_ready=2, min_replicas=1, parked=4, suspended="", workers=workers),
                          slurm(inference=inference, lives=[{"words": "epoch 1 (12_0 on trn0): started at step 0"}]))
    for part in ("checkpoint step 3, 1m02s old", "replicas 2 ready, training needs 1 4 groups parked",
                 "inference 2 running on inf0,inf1 (1m00s left), 6 to follow, 3 done, 1 failed", "training 1 running on trn0 (12m05s left)",
                 "used 12.35 GPU-hours used (9.35 inference, 3.00 training), 0.50 wasted", "rollout 0 node7 job 11_0", "(draining)",
                 "epoch 1 (12_0 on trn0): started at step 0"):
        assert part in text, part
    best = {"step": 3, "age_s": 61.0, "best_step": 2, "best_accuracy": 0.8125}
    assert "step 3, 1m02s old; the best is step 2 (0.812)" in shown_on_slurm(status(checkpoint=best), slurm())
    assert "suspended saving" in shown_on_slurm(status(suspended="saving"), slurm())
    drained = shown_on_slurm(status(), slurm(train=role(done=1)), {"state": "drained", "cause": "by headway stop --drain"})
    assert "drained: by headway stop --drain" in drained


@pytest.mark.parametrize(("train", "words"), [
    (role(running=[running()]), "training job 12_0 runs on trn0; its coordinator has not written its status yet"),
    (role(running=[running(state="CONFIGURING")]), "training job 12_0 on trn0: CONFIGURING"),
    (role(pending=3, reasons={"Resources": 1, "JobArrayTaskLimit": 2}, next="12_1"), "job 12_1, which is pending (Resources: no nodes are free)"),
    (role(pending=1, reasons={"QOSMaxGRESPerUser": 1}, next="12_1"), "(QOSMaxGRESPerUser: your limit in this QOS is reached)"),
    (role(pending=1, reasons={"Priority": 1}, next="12_1", starts=NOW + 600), "(Priority: jobs of higher priority are ahead, starts about "),
    (role(pending=1, reasons={"NeverSeenBefore": 1}, next="12_1"), "pending (NeverSeenBefore)"),
    (role(pending=1, reasons={"JobHeldUser": 1}, next="12_1"), "(JobHeldUser: held: scontrol release)"),
    (role(pending=1, reasons={"AssocMaxWallDurationPerJobLimit": 1}, next="12_1"), "it asks for more than one job may have"),
    (role(), "no training job is in the queue")])
def test_what_a_run_on_slurm_waits_for(train: dict[str, Any], words: str) -> None:
    assert words in shown_on_slurm(None, slurm(train=train))


def test_a_coordinator_that_went_away_or_never_was() -> None:
    gone = shown_on_slurm(status(time=NOW - 61), slurm())
    assert "its coordinator has not written its status for 1m01s" in gone and "worker process" not in gone
    queued = shown_on_slurm(status(time=NOW - 3600, checkpoint={"step": 3, "age_s": 61.0}), slurm(checkpoint={"step": 3, "age_s": 3661.0}))
    assert "checkpoint step 3, 1h01m old" in queued
    unknown = shown_on_slurm(None, slurm(hours=None, train=role(pending=1, reasons={"Priority": 1}, done=None, failed=None)))
    assert "unknown: SLURM keeps no accounting here" in unknown


def test_words_from_elsewhere_command_the_terminal_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cause may quote what a model wrote."""
    cause = "3 groups in a row have failed: no number in 'a\x1b]52;c;ZXZpbA==\x07b\x1b[2J'"
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", StringIO())
    console = terminal()
    console.print(panel("run7", status(), [], [], NOW, {"state": "failed", "cause": cause}))
    console.print(cause, style="bold red", soft_wrap=True)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b]52" not in said and "\x1b[2J" not in said and said.count("\\u001b]52") == 2 and "\x1b[1;31m" in said


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_lines_are_as_wide_as_the_terminal(kind: str) -> None:
    """In a real terminal of 60 columns."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": kind}
    process = subprocess.Popen([sys.executable, "-c", "from launcher.views.terminal import terminal; terminal().rule('x', characters='-')"],
                               env=environment, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the end of a terminal is an error
        while piece := os.read(screen, 4096):
            shown += piece
    os.close(screen)
    assert process.wait() == 0 and shown.count(b"-") == 57, shown

"""What a run has used and lost: from the run folder's epochs and SLURM's accounting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.monitoring.observation import Observation, figures
from launcher.slurm.accounting import IdleTime, NewestCheckpoint, account, describe, last_sign, newest_checkpoint, training_hours
from launcher.slurm.queries import HistoryEntry, QueueEntry
from launcher.slurm.states import State
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.run.incarnations import Claim, End, Incarnation

HOUR = 3600.0


def life(epoch: int, start: float, first_step: int = 0, **end: Any) -> Incarnation:
    ended = End(end["how"], "", end.get("step", 0), end.get("checkpoint", -1), end.get("end", 0.0)) if end else None
    return Incarnation(Claim(epoch, f"10{epoch}", f"1_{epoch}", 0, "trn0", 7, start, first_step), ended)


def past(element: str, start: float, hours: float, num_gpus: int = 4, state: State = State.COMPLETED) -> HistoryEntry:
    return HistoryEntry(element, state, hours * HOUR, num_gpus, ("trn0",), start, start + hours * HOUR, 0)


def test_what_is_used() -> None:
    history = {"train": [past("1_1", 0, 2.0), past("1_1", 9000, 0.5, state=State.REQUEUED)], "inference": [past("2_0", 0, 3.0, 1)]}
    hours = account([], history, None, 0.0)
    assert (hours.used, hours.train, hours.inference, hours.wasted, hours.unit) == (13.0, 10.0, 3.0, 0.0, "GPU-hours")
    assert account([], {"train": [past("1_1", 0, 2.0, 0)], "inference": []}, None, 0.0).unit == "element-hours"
    assert account([], {"train": [], "inference": []}, None, 100.0).used == 0


def test_what_is_lost_by_a_crash() -> None:
    history = {"train": [past("1_1", 0, 2.0, state=State.FAILED)], "inference": []}
    crashed = life(1, 10, 0, how="crashed", step=10, checkpoint=5, end=2 * HOUR)
    assert account([crashed], history, None, 0.0).wasted == pytest.approx(4.0), "half of 2 hours on 4 GPUs"
    nothing_done = life(1, 10, 5, how="crashed", step=5, checkpoint=5, end=2 * HOUR)
    assert account([nothing_done], history, None, 0.0).wasted == pytest.approx(8.0)
    for how in ("finished", "walltime", "preempted", "drained", "stopped"):
        assert account([life(1, 10, how=how, step=10, checkpoint=5)], history, None, 0.0).wasted == 0


def test_what_is_lost_without_a_word() -> None:
    history = {"train": [past("1_1", 0, 2.0, state=State.NODE_FAIL), past("1_2", 2.5 * HOUR, 1.0, state=State.RUNNING)], "inference": []}
    going_on = life(2, 2.5 * HOUR + 1, 7)
    assert account([life(1, 10), going_on], history, None, 0.0).wasted == 0, "how many steps it lost is not known"
    assert account([life(1, 10, 7), going_on], history, None, 0.0).wasted == pytest.approx(8.0), "it got nowhere"
    saved = NewestCheckpoint(1, 7, 1.5 * HOUR)
    assert account([life(1, 10), going_on], history, saved, 0.0).wasted == pytest.approx(2.0), "half an hour after its checkpoint"
    assert account([life(2, 2.5 * HOUR + 1, 7)], history, None, 0.0).wasted == 0, "it runs"


def test_idle_inference_is_lost_too_but_not_more_than_there_was() -> None:
    history = {"train": [], "inference": [past("2_0", 0, 2.0, 1), past("2_1", 0, 2.0, 1)]}
    assert account([], history, None, 0.5 * HOUR).wasted == pytest.approx(0.5)
    assert account([], history, None, 100 * HOUR).wasted == pytest.approx(4.0)


def test_idle_time_is_that_of_all_incarnations() -> None:
    before, after = [{"rollout_idle_s": 100.0}, {"rollout_idle_s": 3000.0}, {"step": 3}], [{"rollout_idle_s": 20.0}, {"rollout_idle_s": 50.0}]
    idle = IdleTime().add(before).add(after)
    assert idle.seconds == 3030.0


def test_training_time_without_accounting() -> None:
    lives = [life(1, 0.0, end=HOUR, how="walltime"), life(2, 2 * HOUR), life(3, 3 * HOUR, end=3.5 * HOUR, how="crashed")]
    assert training_hours(lives, 10 * HOUR) == pytest.approx(2.5) and training_hours([], 5.0) == 0
    assert training_hours(lives[:2], 2.5 * HOUR) == pytest.approx(1.5)


def test_training_time_of_a_life_without_an_end() -> None:
    killed, days = life(1, HOUR), 100 * HOUR
    assert training_hours([killed], days, seen=0.0) == 0, "it was never seen"
    assert training_hours([killed], days, seen=3 * HOUR) == pytest.approx(2.0)
    assert training_hours([killed], days, running={"1_1"}, seen=3 * HOUR) == pytest.approx(99.0), "a coordinator may be silent for a while"
    assert training_hours([killed], days, running={"1_2"}, seen=3 * HOUR) == pytest.approx(2.0)
    ended = [past("1_1", 0.9 * HOUR, 1.1, state=State.NODE_FAIL), past("1_1", 4 * HOUR, 1.0, state=State.RUNNING)]
    assert training_hours([killed], days, ended, {"1_1"}, 3 * HOUR) == pytest.approx(1.0), "of its own incarnation, not of the next one"
    assert training_hours([killed, life(2, 1.5 * HOUR, end=2 * HOUR, how="drained")], days, ended, (), 2 * HOUR) == pytest.approx(1.0)


def test_when_training_was_seen(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    assert last_sign(run, None) == 0 and last_sign(run, NewestCheckpoint(1, 2, 7.0)) == 7
    run.status.write_text('{"time": 9.0}')
    assert last_sign(run, None) == 9 and last_sign(run, NewestCheckpoint(1, 2, 11.0)) == 11
    killed, running = [life(1, HOUR)], [QueueEntry("1", 1, "9", State.RUNNING, "", ("trn0",), 5.0, 600.0)]
    nothing: dict[str, list[HistoryEntry]] = {"train": [], "inference": []}
    assert Observation(9 * HOUR, {"train": running}, nothing, "", killed, None, 2 * HOUR).training_hours == pytest.approx(8.0)
    assert Observation(9 * HOUR, {"train": []}, nothing, "", killed, None, 2 * HOUR).training_hours == pytest.approx(1.0)


def test_gpus_that_accounting_does_not_know() -> None:
    history = {"train": [past("1_1", 0, 2.0, 0)], "inference": [past("2_0", 0, 3.0, 0)]}
    hours = account([], history, None, 0.0, {"1": 4, "2": 1})
    assert (hours.train, hours.inference, hours.unit) == (8.0, 3.0, "GPU-hours")
    assert account([], {"train": [past("1_1", 0, 2.0, 2)], "inference": []}, None, 0.0, {"1": 4}).used == 4.0, "accounting knows better"
    assert account([], history, None, 0.0, {"1": 0, "2": 0}).unit == "element-hours"
    observed = Observation(9 * HOUR, {"train": [], "inference": []}, history, "", [], None, gpus={"1": 4, "2": 1})
    assert figures(observed, 0.0)["hours"]["used"] == 11.0


def test_the_run_folder(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    assert newest_checkpoint(run) is None
    assert incarnations.claim(run, "12_0", "17", 1, "trn0", 7, 0) == 1 and incarnations.claim(run, "12_1", "18", 0, "trn1", 8, 4) == 2
    incarnations.record_end(run, 1, "crashed", "out of memory", 6, 4)
    first, second = incarnations.history(run)
    assert describe(first) == "epoch 1 (12_0 on trn0): crashed at step 6, checkpoint 4: out of memory"
    assert describe(second) == "epoch 2 (12_1 on trn1): started at step 4"
    for name, content in (("1.9", {"time": 1.0}), ("1.10", {"time": 2.0}), ("2.4", {"time": 3.0}), ("2.6", None)):
        (run.checkpoints / name).mkdir()
        if content is not None:
            (run.checkpoints / name / "manifest.json").write_text(json.dumps(content))
    for name in (".3.8.tmp", "3.8-copy", "3.8.bak"):
        (run.checkpoints / name).mkdir()
    assert newest_checkpoint(run) == NewestCheckpoint(2, 4, 3.0), "what has no manifest is not complete; a later epoch is another lineage"
    (run.checkpoints / "2.4" / "manifest.json").write_text('{"time": 3')
    assert newest_checkpoint(run) == NewestCheckpoint(1, 10, 2.0), "nor is one whose manifest was cut short"
    (run.checkpoints / "2.4" / "manifest.json").unlink()
    assert newest_checkpoint(run) == NewestCheckpoint(1, 10, 2.0)


def test_figures_of_the_roles() -> None:
    queue = {"train": [QueueEntry("1", 2, "9", State.RUNNING, "", ("trn0",), 5.0, 600.0)],
             "inference": [QueueEntry("2", 11, "10", State.PENDING, "Priority", (), 2000.0, 60.0),
                           QueueEntry("2", 9, "11", State.PENDING, "JobArrayTaskLimit", (), None, 60.0)]}
    history = {"train": [past("1_0", 0, 1.0, state=State.FAILED), past("1_2", 0, 1.0, state=State.FAILED), past("1_1", 0, 1.0)], "inference": []}
    result = figures(Observation(1000.0, queue, history, "", [life(1, 3)], NewestCheckpoint(1, 4, 990.0)), 0.0)
    train, inference = result["roles"]["train"], result["roles"]["inference"]
    assert train["running"] == [{"element": "1_2", "state": "RUNNING", "nodes": ["trn0"], "time_left_s": 600.0}]
    assert (train["done"], train["failed"], train["pending"]) == (1, 1, 0), "1_2 failed once and runs again"
    assert inference["next"] == "2_9" and inference["starts"] == 2000.0 and inference["reasons"] == {"Priority": 1, "JobArrayTaskLimit": 1}
    assert result["checkpoint"] == {"step": 4, "age_s": 10.0} and result["hours"]["used"] == 12.0
    unknown = figures(Observation(1000.0, queue, history, "no slurmdbd", [], None), 0.0)
    assert unknown["hours"] is None and unknown["roles"]["train"]["done"] is None and unknown["no_accounting"] == "no slurmdbd"
    json.dumps(result)

"""`headway stop` on SLURM: who is told, what is cancelled, and which outcome is left, with a queue that does as it is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.jobs import liveness
from launcher.monitoring import stop
from launcher.slurm.queries import QueueEntry, SlurmError
from launcher.slurm.states import State
from workers.run.folder import RunFolder

Entries = dict[str, list[QueueEntry]]


def entry(task: int, state: State) -> QueueEntry:
    return QueueEntry("1", task, str(task), state, "", () if state.waiting else ("n0",), None, None)


class Queue:
    """The run's elements; `after`: what happens before each look, given its number."""

    def __init__(self, run: RunFolder, entries: Entries, after: Callable[[Queue, int], None] = lambda *_: None) -> None:
        self.run, self.entries, self.after = run, entries, after
        self.cancelled: list[bool] = []
        self.looks = 0

    def look(self, _: RunFolder) -> Entries:
        self.looks += 1
        self.after(self, self.looks)
        return self.entries

    def cancel(self, _: RunFolder, pending_only: bool = False) -> None:
        self.cancelled.append(pending_only)
        self.entries = {role: [one for one in entries if pending_only and not one.state.waiting] for role, entries in self.entries.items()}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    run.config.write_text('{"weights": {"dir": "run"}}')
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": True, "arrays": [], "jobs": []}))
    for module in (liveness, stop):
        monkeypatch.setattr(module, "POLL_S", 0.01)
    monkeypatch.setattr(liveness, "KILL_S", 0.1)
    return run


def use(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Queue:
    for module in (liveness, stop):
        monkeypatch.setattr(module, "queue", queue.look)
        monkeypatch.setattr(module, "cancel", queue.cancel)
    return queue


def save(run: RunFolder, step: int = 12) -> None:
    (run.checkpoints / f"1.{step}").mkdir()
    (run.checkpoints / f"1.{step}" / "manifest.json").write_text('{"time": 1.0}')


@pytest.mark.parametrize(("drain", "saved", "state"), [(False, True, "failed"), (True, True, "drained"), (True, False, "failed")])
def test_without_a_coordinator_the_outcome_is_recorded_here(run: RunFolder, monkeypatch: pytest.MonkeyPatch, drain: bool, saved: bool,
                                                            state: str) -> None:
    def inference_leaves(queue: Queue, _: int) -> None:
        if run.ended() is not None:
            queue.entries = {**queue.entries, "inference": [one for one in queue.entries["inference"] if one.state.waiting]}

    if saved:
        save(run)
    queue = use(Queue(run, {"train": [entry(0, State.PENDING)], "inference": [entry(1, State.RUNNING), entry(2, State.PENDING)]}, inference_leaves),
                monkeypatch)
    words = stop.stop(run, "by the test", patience_s=60, drain=drain)
    assert (run.ended() or {})["state"] == state and queue.cancelled == [True]
    assert run.stop_requested() == {"reason": "by the test", "drain": drain}
    assert words == (f"drained at step 12; go on with: headway resume {run.path}" if state == "drained" else "stopped")


def test_a_coordinator_is_left_to_act(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def happens(queue: Queue, number: int) -> None:
        if number == 3:
            run.end("by the coordinator", "coordinator", "drained")
        if number == 5:
            queue.entries = {"train": [], "inference": []}

    queue = use(Queue(run, {"train": [entry(0, State.RUNNING), entry(1, State.PENDING)], "inference": []}, happens), monkeypatch)
    save(run)
    assert "drained at step 12" in stop.stop(run, "by the test", patience_s=60, drain=True)
    assert (run.ended() or {})["cause"] == "by the coordinator" and queue.cancelled == [True], "only what was left pending"


def test_an_element_that_begins_just_now_finds_the_request(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def happens(queue: Queue, number: int) -> None:
        if number == 2:
            queue.entries = {"train": [entry(0, State.RUNNING)], "inference": []}
        if number == 4:
            assert run.ended() is None
            queue.entries = {"train": [], "inference": []}

    use(Queue(run, {"train": [entry(0, State.PENDING)], "inference": []}, happens), monkeypatch)
    assert stop.stop(run, "by the test", patience_s=60) == "stopped"


def test_what_does_not_end_is_cancelled(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = use(Queue(run, {"train": [entry(0, State.RUNNING)], "inference": [entry(1, State.RUNNING)]}), monkeypatch)
    assert stop.stop(run, "by the test", patience_s=0.05) == "stopped by force: 2 elements had not ended after 0.05 s"
    assert queue.cancelled[-1] is False and "stopped by force" in (run.ended() or {})["cause"]


def test_what_even_scancel_does_not_end_is_told(run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Stuck(Queue):
        def cancel(self, _: RunFolder, pending_only: bool = False) -> None:
            self.cancelled.append(pending_only)

    use(Stuck(run, {"train": [entry(0, State.COMPLETING)], "inference": []}), monkeypatch)
    monkeypatch.setattr(stop, "PATIENCE_S", -1000.0)
    assert stop.main([str(run.path)]) == 1 and "and 1 are still there" in capsys.readouterr().out


@pytest.mark.parametrize("ends", [True, False])
def test_a_run_on_another_machine_is_asked_and_left_to_it(run: RunFolder, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    run.submitted.write_text(json.dumps({"cluster": "local", "complete": True, "host": "login1", "jobs": []}))
    run.status.write_text("{}")
    save(run)

    def sleep(_: float) -> None:
        assert run.stop_requested() == {"reason": "by the test", "drain": True}
        if ends:
            run.end("by the coordinator", "coordinator", "drained")
        else:
            os.utime(run.status, (0, 0))

    monkeypatch.setattr(stop.time, "sleep", sleep)
    said = stop.stop(run, "by the test", patience_s=60, drain=True)
    assert ("drained at step 12" in said) if ends else ("the run is on login1, has been asked to end, and has not" in said and run.ended() is None)


def test_nothing_left(run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use(Queue(run, {"train": [], "inference": []}), monkeypatch)
    assert stop.main([str(run.path)]) == 0 and "stopped" in capsys.readouterr().out
    assert stop.main([str(run.path), "--drain"]) == 0 and "had ended already" in capsys.readouterr().out


def test_a_request_to_drain_gives_way_to_one_to_stop(run: RunFolder) -> None:
    stop._ask(run, "first", True)
    stop._ask(run, "second", True)
    assert run.stop_requested() == {"reason": "first", "drain": True}
    stop._ask(run, "third", False)
    stop._ask(run, "fourth", True)
    assert run.stop_requested() == {"reason": "third", "drain": False}


def test_an_array_without_an_id_is_found_and_cancelled(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """sbatch's answer was lost, and slurmctld queued the array after the launcher had looked."""
    queued = [QueueEntry("78", 0, "78", State.PENDING, "", (), None, None)]
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": True, "jobs": [], "arrays": [
        {"role": "train", "name": "x-1", "job_id": None, "submitted": 1.0}]}))
    monkeypatch.setattr(liveness.queries, "jobs_named", lambda name: ["78"] if name == "x-1" else [])
    monkeypatch.setattr(liveness.queries, "squeue", lambda ids: [one for one in queued if one.array_job_id in ids])
    monkeypatch.setattr(liveness.queries, "cancel", lambda ids, pending_only=False: queued.clear() if ids == ["78"] else None)
    assert stop.stop(run, "by the test", patience_s=60) == "stopped" and queued == []


def test_slurm_away(run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def away(_: RunFolder) -> Entries:
        raise SlurmError("squeue: no answer")

    monkeypatch.setattr(stop, "queue", away)
    assert stop.main([str(run.path)]) == 2 and run.stop_requested() is not None
    assert "squeue: no answer\nThe request to stop stands" in capsys.readouterr().err

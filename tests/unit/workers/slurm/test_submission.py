"""A run whose submission was cut short is ended by whoever of it is there, and by nobody else."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path

import pytest

from workers.run.folder import RunFolder
from workers.slurm import element, submission
from workers.slurm.submission import CUT_SHORT, PATIENCE_S, SubmissionWatch


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(submission, "time", clock)
    return clock


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def submit(run: RunFolder, *job_ids: str | None, complete: bool = False) -> None:
    run.submitted.write_text(json.dumps({"cluster": "slurm", "complete": complete, "arrays": [
        {"role": "train", "job_id": job_id} for job_id in job_ids]}))


def test_a_whole_submission_is_seen_at_once(run: RunFolder, clock: Clock) -> None:
    submit(run, "7", complete=True)
    assert SubmissionWatch(run).is_whole() and run.ended() is None


@pytest.mark.parametrize("begun", [True, False])
def test_a_submission_that_does_not_go_on_ends_the_run(run: RunFolder, clock: Clock, begun: bool) -> None:
    """Also where the first word of it is missing."""
    if begun:
        submit(run, "7", None)
    watch = SubmissionWatch(run)
    assert not watch.is_whole()
    clock.now += PATIENCE_S
    assert not watch.is_whole() and run.ended() is None
    clock.now += 0.1
    assert not watch.is_whole()
    outcome = run.ended()
    assert outcome is not None and (outcome["state"], outcome["cause"]) == ("failed", CUT_SHORT)
    assert watch.is_whole(), "there is nothing more to wait for"


def test_every_step_of_the_submission_renews_the_patience(run: RunFolder, clock: Clock) -> None:
    watch = SubmissionWatch(run)
    for number in range(5):
        submit(run, *map(str, range(number)), None)
        assert not watch.is_whole()
        clock.now += PATIENCE_S
        assert not watch.is_whole()
    assert run.ended() is None
    submit(run, "7", complete=True)
    clock.now += 10 * PATIENCE_S
    assert watch.is_whole() and run.ended() is None


def test_a_later_submission_without_an_answer_is_no_reason_to_end(run: RunFolder, clock: Clock) -> None:
    submit(run, "7", None, complete=True)
    watch = SubmissionWatch(run)
    for _ in range(3):
        assert watch.is_whole() and run.ended() is None
        clock.now += 2 * PATIENCE_S


def test_a_run_that_has_ended_is_not_waited_for(run: RunFolder, clock: Clock) -> None:
    submit(run, None)
    run.end("stopped", "someone")
    assert SubmissionWatch(run).is_whole()
    outcome = run.ended()
    assert outcome is not None and outcome["cause"] == "stopped"


async def test_an_element_looks_again_where_the_run_folder_was_away(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([OSError(errno.EIO, "Input/output error"), {}, {"complete": True}])

    def look(_: RunFolder) -> dict:
        found = next(looks)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(RunFolder, "submission", look)
    monkeypatch.setattr(element, "LOOK_S", 0.0)
    await asyncio.wait_for(element._watch_submission(run), 60)
    assert next(looks, None) is None

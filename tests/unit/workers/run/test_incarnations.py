"""Incarnations of the training job: claimed once each, ended once each, and counted when they crash."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.support.processes import NUM_PROCESSES, together
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.run.incarnations import IN_ORDER, Claim, End, Incarnation, consecutive_crashes

NUM_CLAIMS = 8


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def claim(run: RunFolder, step: int = 0, job: str = "") -> int:
    return incarnations.claim(run, f"{job}_0", job, 0, "node", 1, step)


# -- on disk -------------------------------------------------------------------------------------------------------------

def test_epochs_are_claimed_once_each(run: RunFolder) -> None:
    claims = together(lambda number: [claim(run, number) for _ in range(NUM_CLAIMS)])
    assert all(numbers == sorted(numbers) for numbers in claims)
    everything = list(range(1, NUM_PROCESSES * NUM_CLAIMS + 1))
    assert sorted(number for numbers in claims for number in numbers) == everything
    assert sorted(path.name for path in run.epochs.iterdir()) == [f"{number:06d}" for number in everything]
    assert [past.claim.epoch for past in incarnations.history(run)] == everything, "each is whole"


def test_epochs_go_on_where_they_stopped(run: RunFolder) -> None:
    assert [claim(run), claim(run)] == [1, 2]
    incarnations.record_end(run, 2, "crashed", "no memory", 3, -1)
    assert run.newest_epoch() == 2, "an end is no claim"
    (run.epochs / "1000000").touch()  # one more digit than the usual names have
    assert claim(run) == 1000001


def test_a_lost_race_for_an_epoch_takes_the_next(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    real = incarnations.write_once

    def late(path: Path, content: bytes) -> bool:
        monkeypatch.setattr(incarnations, "write_once", real)
        path.touch()  # somebody else, between listing and claiming
        return real(path, content)

    monkeypatch.setattr(incarnations, "write_once", late)
    assert claim(run) == 2


def test_a_claim_says_who_and_from_where(run: RunFolder) -> None:
    epoch = incarnations.claim(run, "1234_2", "1236", 1, "trn0", 77, 40)
    [past] = incarnations.history(run)
    assert past.end is None and msgspec.structs.replace(past.claim, time=0.0) == Claim(epoch, "1236", "1234_2", 1, "trn0", 77, 0.0, 40)
    assert msgspec.json.decode((run.epochs / "000001").read_bytes())["element"] == "1234_2"


def test_the_first_word_about_an_end_counts(run: RunFolder) -> None:
    claim(run)
    incarnations.record_end(run, 1, "crashed", "no memory", 3, 2)
    incarnations.record_end(run, 1, "walltime", "", 4, 4)
    [past] = incarnations.history(run)
    assert past.end is not None and (past.end.how, past.end.cause, past.end.step, past.end.checkpoint) == ("crashed", "no memory", 3, 2)


def test_history_is_in_order_beyond_a_million(run: RunFolder) -> None:
    for epoch in (999_999, 1_000_000, 1_000_001):
        record = Claim(epoch, "", "", 0, "node", 1, 0.0, 0)
        (run.epochs / f"{epoch:06d}").write_bytes(msgspec.json.encode(record))
    assert [past.claim.epoch for past in incarnations.history(run)] == [999_999, 1_000_000, 1_000_001]


# -- crashes in a row ----------------------------------------------------------------------------------------------------

def past(*entries: tuple) -> list[Incarnation]:
    """Of (step it begins with, how it ended or None, job, restarts)."""
    found = []
    for epoch, (step, how, *rest) in enumerate(entries, start=1):
        job, restarts = rest[0] if rest else "", rest[1] if len(rest) > 1 else 0
        end = End(how, "", step, step, 0.0) if how else None
        found.append(Incarnation(Claim(epoch, job, "", restarts, "node", 1, 0.0, step), end))
    return found


@pytest.mark.parametrize(("entries", "step_now", "requeued", "count"), [
    ([], 0, set(), 0),
    ([(0, "crashed")], 0, set(), 1),
    ([(0, "crashed"), (0, "crashed"), (0, "crashed")], 0, set(), 3),
    ([(0, "crashed"), (0, "walltime"), (5, "crashed")], 5, set(), 1),
    ([(0, "crashed"), (0, "crashed"), (0, "walltime")], 5, set(), 0),
    ([(0, "crashed"), (0, "walltime"), (0, "crashed"), (0, "crashed")], 0, set(), 2),
    # progress: it crashed, but has left a new checkpoint
    ([(0, "crashed"), (0, "crashed")], 5, set(), 1),
    ([(0, "crashed"), (0, "crashed"), (5, "crashed")], 5, set(), 2),
    ([(0, "crashed"), (0, "crashed"), (5, "crashed"), (5, "crashed")], 5, set(), 3),
    ([(0, "crashed"), (5, "crashed"), (7, "crashed")], 9, set(), 1),
    # killed without a word
    ([(0, None)], 0, set(), 1),
    ([(0, None, "7"), (0, None, "8")], 0, set(), 2),
    ([(0, "walltime"), (5, None), (5, "crashed")], 5, set(), 2),
    # killed, but SLURM starts the same job again: nobody's fault
    ([(0, None, "7", 0)], 0, {"7"}, 0),
    ([(0, None, "7", 0)], 0, {"8"}, 1),
    ([(0, None, "7", 0), (0, "crashed", "7", 1)], 0, set(), 1),
    ([(0, None, "7", 0), (0, None, "7", 1), (0, "crashed", "7", 2)], 0, set(), 1),
    ([(0, None, "7", 1), (0, "crashed", "7", 1)], 0, set(), 2),
    ([(0, "crashed", "6"), (0, None, "7", 0), (0, "crashed", "7", 1)], 0, set(), 2),
    ([(0, "crashed", "6"), (0, None, "7", 0)], 0, {"7"}, 1),
    # a crash is one, whatever SLURM does then
    ([(0, "crashed", "7", 0), (0, "crashed", "7", 1)], 0, {"7"}, 2),
    # on one machine there is no job that could be started again
    ([(0, None, "", 0), (0, None, "", 1)], 0, {""}, 2),
])
def test_crashes_in_a_row(entries: list[tuple], step_now: int, requeued: set[str], count: int) -> None:
    assert consecutive_crashes(past(*entries), step_now, requeued) == count


@pytest.mark.parametrize("how", IN_ORDER)
def test_an_end_in_order_begins_a_new_row(how: str) -> None:
    assert consecutive_crashes(past((0, "crashed"), (0, how)), 0, set()) == 0
    assert consecutive_crashes(past((0, "crashed"), (0, how), (0, "crashed")), 0, set()) == 1


def test_training_time_adds_up_over_incarnations(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")

    def begin(trained_s: float) -> Claim:
        claim = incarnations.claim_of(run, incarnations.claim(run, "", "", 0, "node", 1, 0))
        assert claim.trained_s == pytest.approx(trained_s, abs=1.0)
        return claim

    first = begin(0.0)
    incarnations.record_end(run, first.epoch, "walltime", "", 5, 5)
    (run.epochs / "000001.end").write_bytes(msgspec.json.encode(msgspec.structs.replace(incarnations.history(run)[0].end, time=first.time + 100)))
    second = begin(100.0)
    third = begin(100.0)  # that one was never seen
    run.status.write_text(json.dumps({"time": third.time + 50, "more": 1}))
    begin(150.0)
    assert second.time <= third.time

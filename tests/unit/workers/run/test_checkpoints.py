"""Checkpoints on disk: whole or not there, passed over when broken, and nothing from whoever is fenced off."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.messages.parts import Version
from workers.metrics.recorder import Recorder
from workers.run import checkpoints, incarnations
from workers.run.checkpoints import (
    COORDINATOR,
    MANIFEST,
    TRAINER,
    Checkpoint,
    Fenced,
    Retention,
    all_checkpoints,
    begin,
    best_of,
    commit,
    describe,
    find_problem,
    newest,
    put_aside,
)
from workers.run.files import read_lines
from workers.run.folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder.create(tmp_path / "run")
    claim(run)
    return run


def claim(run: RunFolder) -> int:
    return incarnations.claim(run, "", "", 0, "node", 1, 0)


def fill(folder: Path, text: str = "") -> None:
    (folder / TRAINER / "rank").mkdir()
    (folder / TRAINER / "rank" / "weights").write_text("weights " * 100 + text)
    (folder / TRAINER / "empty").touch()
    (folder / COORDINATOR).write_text("ledger " + text)


def save(run: RunFolder, epoch: int, step: int, keep: int = 2, text: str = "", **retention: Any) -> Checkpoint:
    version = Version(epoch, step)
    folder = begin(run, version)
    fill(folder, text)
    return commit(run, folder, version, Retention(keep, **retention))


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_is_not_there_until_it_is_whole(run: RunFolder) -> None:
    folder = begin(run, Version(1, 3))
    assert folder.stat().st_mode & 0o077 == 0 and (folder / TRAINER).is_dir()
    fill(folder)
    assert newest(run) is None and all_checkpoints(run) == []
    done = commit(run, folder, Version(1, 3), Retention(2))
    assert newest(run) == done == Checkpoint(run.checkpoints / "1.3", Version(1, 3)) and names(run) == ["1.3"]
    assert done.trainer.is_dir() and done.coordinator.read_text() == "ledger " and find_problem(done) == ""


def test_begin_makes_a_clean_folder(run: RunFolder) -> None:
    (begin(run, Version(1, 3)) / "left over").touch()
    assert list(begin(run, Version(1, 3)).iterdir()) == [begin(run, Version(1, 3)) / TRAINER]


@pytest.mark.parametrize(("keep", "kept"), [(1, ["1.12"]), (2, ["1.11", "1.12"]), (3, ["1.9", "1.11", "1.12"]), (9, ["1.2", "1.9", "1.11", "1.12"])])
def test_the_newest_are_kept(run: RunFolder, keep: int, kept: list[str]) -> None:
    for step in (2, 9, 11, 12):  # numbers, not letters
        save(run, 1, step, keep)
    assert [checkpoint.folder.name for checkpoint in all_checkpoints(run)] == kept
    found = newest(run)
    assert found is not None and found.version == Version(1, 12)


def test_a_later_epoch_is_newer_whatever_its_step(run: RunFolder) -> None:
    save(run, 1, 9)
    assert claim(run) == 2
    save(run, 2, 3)
    found = newest(run)
    assert found is not None and found.version == Version(2, 3)
    assert [checkpoint.version for checkpoint in all_checkpoints(run)] == [Version(1, 9), Version(2, 3)]


def test_what_several_ranks_are_to_compare_is_left_to_them(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    before, broken = save(run, 1, 3), save(run, 1, 4)
    part = broken.trainer / "rank" / "weights"
    part.write_bytes(bytes(reversed(part.read_bytes())))
    assert newest(run, by_digests=False) == before, "what is small is compared by everybody"
    monkeypatch.setattr(checkpoints, "SMALL_BYTES", 0)
    assert newest(run, by_digests=False) == broken and newest(run) == before
    put_aside(broken, "two ranks have found it so")
    assert newest(run, by_digests=False) == before == newest(run) and names(run) == [".1.4.broken", "1.3"]
    save(run, 1, 5)
    assert names(run) == ["1.3", "1.5"]
    with before.coordinator.open("ab") as file:
        file.write(b"!")
    assert find_problem(before, by_digests=False) == f"{before.coordinator.name} is not what was written"


def test_the_same_step_is_saved_again(run: RunFolder) -> None:
    """By time, and then at the end: the coordinator's part has gone on."""
    save(run, 1, 2)
    save(run, 1, 3, text="first")
    again = save(run, 1, 3, text="second")
    assert again.coordinator.read_text() == "ledger second" and find_problem(again) == "" and names(run) == ["1.2", "1.3"]
    assert newest(run) == again


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("died_after", [0, 1, 2])
def test_whoever_dies_while_saving_again_leaves_a_whole_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch, keep: int,
                                                                  died_after: int) -> None:
    """At whatever rename it dies."""
    save(run, 1, 2, keep)
    save(run, 1, 3, keep, "first")
    done: list[Path] = []
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if len(done) == died_after:
            raise KeyboardInterrupt
        done.append(path)
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    if died_after < 2:
        with pytest.raises(KeyboardInterrupt):
            save(run, 1, 3, keep, "second")
    else:
        save(run, 1, 3, keep, "second")
    monkeypatch.undo()
    found = newest(run)
    assert found is not None and found.version == Version(1, 3) and find_problem(found) == ""
    assert found.coordinator.read_text() == ("ledger second" if died_after == 2 else "ledger first")
    assert claim(run) == 2
    save(run, 2, 4, keep)
    assert names(run) == ["1.2" if died_after == 1 else "1.3", "2.4"][2 - keep:]


# -- which ones stay -----------------------------------------------------------------------------------------------------

def evaluated(run: RunFolder, step: int, accuracy: float) -> None:
    with run.evaluations.open("a") as file:
        file.write(json.dumps({"step": step, "accuracy": accuracy}) + "\n")


def test_the_best_evaluated_one_stays(run: RunFolder) -> None:
    """Also while its accuracy is not known yet: the evaluation takes until after the next checkpoint."""
    for step in (10, 15, 20):
        save(run, 1, step, 1, evaluated_every=10)
    assert names(run) == ["1.10", "1.20"], "of 15 nothing will ever be known"
    evaluated(run, 10, 0.5)
    save(run, 1, 25, 1, evaluated_every=10)
    assert names(run) == ["1.10", "1.20", "1.25"]
    evaluated(run, 20, 0.25)
    save(run, 1, 30, 1, evaluated_every=10)
    assert names(run) == ["1.10", "1.30"]
    evaluated(run, 30, 0.5)
    save(run, 1, 33, 1, evaluated_every=10)
    assert names(run) == ["1.30", "1.33"], "of equals the newest"
    assert describe(run, {30: 0.5, 20: 0.9}, time.time()) == {"step": 33, "age_s": pytest.approx(0, abs=60), "best_step": 30, "best_accuracy": 0.5}
    save(run, 1, 36, 1, evaluated_every=10, best=False)
    assert names(run) == ["1.36"]
    assert set(describe(run, {}, time.time()) or ()) == {"step", "age_s"}


def test_nothing_is_described_before_the_first(run: RunFolder) -> None:
    assert describe(run, {}, 0.0) is None


def test_what_was_passed_over_goes_when_its_lineage_is_lost(run: RunFolder) -> None:
    """It would count as one of the newest, and, with the accuracy of another lineage's step, as the best."""
    for step in (10, 20):
        save(run, 1, step)
    flip(run.checkpoints / "1.20" / COORDINATOR, 0)
    found = newest(run)
    assert found is not None and found.version == Version(1, 10) and claim(run) == 2
    evaluated(run, 20, 0.9)
    save(run, 2, 15, restored=found.version)
    assert names(run) == ["1.10", "2.15"]


versions = st.sets(st.builds(Version, st.integers(1, 3), st.integers(0, 40)), min_size=1, max_size=12)


@given(versions=versions, accuracies=st.dictionaries(st.integers(0, 40), st.floats(0, 1), max_size=8), keep=st.integers(1, 4),
       every=st.integers(0, 5), best=st.booleans())
def test_what_stays(versions: set[Version], accuracies: dict[int, float], keep: int, every: int, best: bool) -> None:
    kept = Retention(keep, best, every).choose(versions, accuracies)
    last = set(sorted(versions)[-keep:])
    assert last <= kept <= versions
    known = {version: accuracies[version.step] for version in versions if version.step in accuracies}
    if not best:
        assert kept == last
    elif known:
        found = best_of(versions, accuracies)
        assert found in kept and accuracies[found.step] == max(known.values())
    else:
        assert best_of(versions, accuracies) is None
    for version in kept - last:
        assert known.get(version) == max(known.values(), default=None) or version.step > max(accuracies, default=-1)


# -- broken ones ---------------------------------------------------------------------------------------------------------

def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "first bit of the weights": (lambda folder: flip(folder / TRAINER / "rank" / "weights", 0), "trainer/rank/weights is not what was written"),
    "last bit of the state": (lambda folder: flip(folder / COORDINATOR, -1), "coordinator.msgpack is not what was written"),
    "a byte short": (lambda folder: os.truncate(folder / COORDINATOR, 3), "coordinator.msgpack is not what was written"),
    "a byte more": (lambda folder: os.truncate(folder / TRAINER / "empty", 1), "trainer/empty is not what was written"),
    "empty": (lambda folder: os.truncate(folder / COORDINATOR, 0), "coordinator.msgpack is not what was written"),
    "file gone": (lambda folder: (folder / COORDINATOR).unlink(), "coordinator.msgpack"),
    "folder gone": (lambda folder: shutil.rmtree(folder / TRAINER), "trainer"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "manifest.json"),
    "empty manifest": (lambda folder: os.truncate(folder / MANIFEST, 0), "truncated"),
    "half a manifest": (lambda folder: os.truncate(folder / MANIFEST, 60), "truncated"),
    "renamed by hand": (lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text().replace('"step": 5', '"step": 6')),
                        "its manifest is of version 1.6"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_broken_one_is_passed_over_loudly(run: RunFolder, damage: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = save(run, 1, 4)
    broken = save(run, 1, 5)
    assert newest(run) == broken
    harm, words = DAMAGES[damage]
    harm(broken.folder)
    assert words in find_problem(broken)
    assert newest(run) == before
    said = capsys.readouterr().out
    assert str(broken.folder) in said and "passed over" in said and words in said
    shutil.rmtree(before.folder)
    assert newest(run) is None


@given(name=st.sampled_from([MANIFEST, COORDINATOR, f"{TRAINER}/rank/weights"]), place=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_bit_is_noticed(run: RunFolder, name: str, place: int, bit: int) -> None:
    """In any file; in the manifest too, unless it still says the same."""
    done = save(run, 1, 5)
    content = bytearray((done.folder / name).read_bytes())
    said = msgspec.json.decode(content)["files"] if name == MANIFEST else None
    content[place % len(content)] ^= 1 << bit
    (done.folder / name).write_bytes(content)
    assert find_problem(done) or msgspec.json.decode(content)["files"] == said


# -- fencing -------------------------------------------------------------------------------------------------------------

def test_whoever_is_fenced_off_publishes_nothing_and_leaves_nothing(run: RunFolder) -> None:
    save(run, 1, 4)
    folder = begin(run, Version(1, 5))
    fill(folder)
    assert claim(run) == 2
    before = files(run.checkpoints / "1.4")
    with pytest.raises(Fenced, match=r"checkpoint 1\.5: epoch 2 has begun"):
        commit(run, folder, Version(1, 5), Retention(1))
    assert names(run) == ["1.4"] and files(run.checkpoints / "1.4") == before


def test_whoever_is_fenced_off_does_not_replace_what_it_had_published(run: RunFolder) -> None:
    save(run, 1, 4, text="first")
    folder = begin(run, Version(1, 4))
    fill(folder, "second")
    claim(run)
    with pytest.raises(Fenced):
        commit(run, folder, Version(1, 4), Retention(2))
    found = newest(run)
    assert found is not None and found.coordinator.read_text() == "ledger first" and names(run) == ["1.4"]


def test_an_incarnation_does_not_end_with_what_an_earlier_one_had_begun(run: RunFolder) -> None:
    fill(begin(run, Version(1, 9)))  # and then it was killed
    claim(run)
    assert newest(run) is None
    save(run, 2, 1)
    assert names(run) == ["2.1"]


def test_a_manifest_names_every_file(run: RunFolder) -> None:
    done = save(run, 1, 3)
    manifest = msgspec.json.decode((done.folder / MANIFEST).read_bytes())
    assert manifest["version"] == {"epoch": 1, "step": 3}
    assert sorted(entry["name"] for entry in manifest["files"]) == [COORDINATOR, "trainer/empty", "trainer/rank/weights"]


def test_what_was_hashed_when_it_was_written_is_not_read_again(run: RunFolder) -> None:
    folder = begin(run, Version(1, 3))
    fill(folder)
    content = (folder / TRAINER / "rank" / "weights").read_bytes()
    written = {f"{TRAINER}/rank/weights": (len(content), blake3(content).hexdigest())}
    assert find_problem(commit(run, folder, Version(1, 3), Retention(2), written)) == ""
    for wrong, problem in (((len(content), "0" * 64), "trainer/rank/weights is not what was written"), ((1, "0" * 64), None)):
        folder = begin(run, Version(1, 4))
        fill(folder)
        if problem is None:
            with pytest.raises(OSError, match="has 800 bytes, 1 were written"):
                commit(run, folder, Version(1, 4), Retention(2), {f"{TRAINER}/rank/weights": wrong})
        else:
            assert problem in find_problem(commit(run, folder, Version(1, 4), Retention(2), {f"{TRAINER}/rank/weights": wrong}))


# -- the metrics that belong to a checkpoint -----------------------------------------------------------------------------

def test_metrics_of_a_lost_lineage_are_cut_off(run: RunFolder) -> None:
    first = Recorder(run)
    for step in (1, 2, 3):
        first.step({"step": step, "loss": 0.5})
        first.consumed(step - 1, [2 * step, 2 * step + 1])
        if step == 2:
            first.evaluation({"step": 2, "accuracy": 0.5})
            positions = first.positions()
    first.evaluation({"step": 3, "accuracy": 0.9})
    first.close()
    second = Recorder(run, positions, 2)
    second.step({"step": 3, "loss": float("nan")})
    second.consumed(2, [8, 9])
    second.close()
    assert [(line["step"], line["loss"]) for line in read_lines(run.metrics)] == [(1, 0.5), (2, 0.5), (3, None)]
    assert [(line["step"], line["groups"]) for line in read_lines(run.consumed)] == [(0, [2, 3]), (1, [4, 5]), (2, [8, 9])]
    assert [line["step"] for line in read_lines(run.evaluations)] == [2]


def test_without_a_checkpoint_metrics_begin_anew(run: RunFolder) -> None:
    first = Recorder(run)
    assert first.positions() == {"metrics.jsonl": 0, "evaluations.jsonl": 0, "consumed.jsonl": 0, "heldout_samples.jsonl": 0}
    first.step({"step": 1})
    first.consumed(0, [1])
    first.close()
    second = Recorder(run)
    second.step({"step": 1, "again": 1})
    second.close()
    assert read_lines(run.metrics) == [{"step": 1, "again": 1}] and read_lines(run.consumed) == []


def test_a_file_that_began_after_the_checkpoint_is_emptied(run: RunFolder) -> None:
    first = Recorder(run)
    positions = first.positions()
    first.evaluation({"step": 0})
    first.close()
    Recorder(run, positions, 0).close()
    assert run.evaluations.read_bytes() == b""

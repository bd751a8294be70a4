"""Groups that are kept to be read: texts token by token, files by step and part, within their size, whatever becomes of the disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.support.groups import make_group
from workers.messages.groups import kept
from workers.messages.parts import Purpose
from workers.metrics import rollout_files
from workers.metrics.rollout_files import PART_TOKENS, RolloutFiles
from workers.metrics.rollout_table import HELDOUT, TRAIN, Kept, Reader


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer by bytes, without merges: what is not ASCII takes several tokens a character."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def written_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the disk is: a run leaves files that take too long to their thread."""
    monkeypatch.setattr(rollout_files, "LEAVE_S", 120.0)


def rows(folder: Path) -> list[dict]:
    return [row for path in sorted(folder.glob("*.parquet")) for row in parquet.read_table(path).to_pylist()]


def heldout(step: int, index: int) -> Kept:
    return Kept(step, HELDOUT, make_group(f"e{step}.{index}", steps=[step], purpose=Purpose.evaluation), "42")


@given(text=st.text(max_size=30), cut=st.integers(0, 3))
def test_each_token_ends_where_it_ends(model: Path, text: str, cut: int) -> None:
    reader, tokenizer = Reader(model), Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id("<end>")]
    ids = ids[:len(ids) - cut]
    told, ends = reader.text(ids)
    assert told == tokenizer.decode(ids, skip_special_tokens=False)
    if ends:
        assert len(ends) == len(ids) and ends == sorted(ends) and ends[-1] <= len(told)
        for number, end in enumerate(ends, 1):
            assert tokenizer.decode(ids[:number], skip_special_tokens=False).startswith(told[:end])
    if not cut:
        assert told == f"{text}<end>" and len(ends) == len(ids)


def test_a_row_a_sample(model: Path, tmp_path: Path) -> None:
    files = RolloutFiles(tmp_path / "rollouts", model, 1 << 30, None)
    group = make_group("g7", steps=[3, 4], rewards=[1.0, -1.0])
    files.keep([Kept(6, TRAIN, group, "5", np.array([-0.25, -1.5], np.float32))])
    files.keep([heldout(6, 0)])
    files.keep([])
    files.close()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["heldout-00000006.000.parquet", "train-00000006.parquet"]
    asked, first, second = rows(tmp_path / "rollouts")
    assert (first["step"], first["kind"], first["group"], first["sample"], first["reference"]) == (6, "train", "g7", 0, "5")
    assert [first["age"], second["age"]] == [2, 1], "step 6 began with the weights of 5 steps"
    assert [first["reward"], second["reward"]] == [1.0, -1.0] and first["tokens"] == [3] and first["num_tokens"] == 1
    assert [first["proximal_logprobs"], second["proximal_logprobs"]] == [[-0.25], [-1.5]] and first["logprobs"] == [-0.5]
    assert second["versions"] == [4] and second["trained_on"] == [True]
    assert asked["kind"] == "heldout" and asked["proximal_logprobs"] is None and asked["reference"] == "42" and asked["versions"] == [6]


def test_an_evaluation_is_written_in_parts(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.metrics.rollout_files.PART_TOKENS", 2)
    assert PART_TOKENS > 2
    files = RolloutFiles(tmp_path / "rollouts", model, 1 << 30, None)
    for index in range(4):
        files.keep([heldout(10, index)])
    files.keep([])
    files.keep([heldout(20, 0)])  # its evaluation is not over when the run goes away
    files.close()
    assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == [
        "heldout-00000010.000.parquet", "heldout-00000010.001.parquet", "heldout-00000020.000.parquet"]
    assert [row["group"] for row in rows(tmp_path / "rollouts")] == ["e10.0", "e10.1", "e10.2", "e10.3", "e20.0"]


def test_an_evaluation_goes_on_beside_what_is_there(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "best-of.parquet").write_bytes(b"a user's own")
    for first in (0, 2):  # an incarnation leaves in the middle of it
        files = RolloutFiles(folder, model, 1 << 30, 10)
        for index in (first, first + 1):
            files.keep([heldout(10, index)])
        files.close()
    (folder / "best-of.parquet").unlink()
    assert [row["group"] for row in rows(folder)] == ["e10.0", "e10.1", "e10.2", "e10.3"]


def test_what_is_judged_once_more_stands_once(model: Path, tmp_path: Path) -> None:
    """A crash in the middle of an evaluation, or after it, and a checkpoint that knew the first of its groups, or none."""
    folder = tmp_path / "rollouts"

    def live(step: int | None, judged: dict[int, set[str]], *indices: int) -> None:
        files = RolloutFiles(folder, model, 1 << 30, step, judged)
        for index in indices:
            files.keep([heldout(10, index)])
            files.keep([])  # as at a checkpoint
        files.close()

    live(None, {}, 0, 1, 2)
    live(10, {10: {"e10.0"}}, 1, 2, 3)
    assert [row["group"] for row in rows(folder)] == ["e10.0", "e10.1", "e10.2", "e10.3"]
    live(10, {10: set()}, 0, 1)
    assert [row["group"] for row in rows(folder)] == ["e10.0", "e10.1"]


def test_the_oldest_go_first(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    files = RolloutFiles(folder, model, 1, None)
    for step in (1, 2, 3):
        files.keep([Kept(step, TRAIN, make_group(steps=[0]), "")])
    files.close()
    assert [path.name for path in folder.iterdir()] == ["train-00000003.parquet"], "the newest is there, however small the room"


@pytest.mark.parametrize(("step", "stay"), [(None, []), (0, []), (2, [1, 2]), (9, [1, 2, 3])])
def test_what_a_lost_lineage_has_kept_goes(model: Path, tmp_path: Path, step: int | None, stay: list[int]) -> None:
    folder = tmp_path / "rollouts"
    files = RolloutFiles(folder, model, 1 << 30, None)
    for number in (1, 2, 3):
        files.keep([Kept(number, TRAIN, make_group(steps=[0]), "")])
    files.close()
    RolloutFiles(folder, model, 1 << 30, step).close()
    assert [row["step"] for row in rows(folder)] == [number for number in stay for _ in range(2)]


def test_a_disk_that_refuses_costs_rollouts_alone(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "rollouts"
    folder.write_text("in the way")
    files = RolloutFiles(folder, model, 1 << 30, None)
    for step in (1, 2):
        files.keep([Kept(step, TRAIN, make_group(steps=[0]), "")])
    files.close()
    folder.unlink()
    files = RolloutFiles(folder, model, 1 << 30, None)
    files.keep([Kept(3, TRAIN, make_group(steps=[0]), "")])
    files.close()
    assert capfd.readouterr().out.count("some rollouts are not kept") == 1, "said once"
    assert {row["step"] for row in rows(folder)} == {3}


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4), st.integers(0, 9))
def test_which_are_kept(sizes: list[list[int]], number: int) -> None:
    """The last minibatches' groups, as many as there are."""
    indices = iter(range(99))
    minibatches = [[next(indices) for _ in minibatch] for minibatch in sizes]
    found = kept(minibatches, number)
    total = sum(map(len, minibatches))
    assert len(found) == len(set(found)) == min(number, total)
    if minibatches and number >= len(minibatches[-1]):
        assert set(minibatches[-1]) <= set(found)
    elif minibatches:
        assert set(found) <= set(minibatches[-1])

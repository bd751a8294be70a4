"""The division of an evaluation's work: elements that come, judge, die and come back leave no prompt out, and judge none twice."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.launch.resume import reopen
from workers.evaluation.chunks import Chunk, Chunks, Holder, divide
from workers.evaluation.element_liveness import at_work
from workers.run.files import read_lines
from workers.run.folder import RunFolder

NUM_PROMPTS = 23


def holder(number: int, job: str = "7", restarts: int = 0) -> Holder:
    return Holder(job, restarts, f"1_{number}", "node", number, 0.0)


class Fleet:
    """Elements that share a folder; those in `alive` are there."""

    def __init__(self, folder: Path, num_prompts: int = NUM_PROMPTS, num_replicas: int = 2) -> None:
        self.folder, self.alive, self.num_judged = folder, dict[int, Chunks](), 0
        self._chunks = divide(num_prompts, num_replicas)
        self._held: dict[int, Chunk | None] = {}

    def begin(self, number: int) -> None:
        chunks = Chunks(self.folder, holder(number), self._living)
        chunks.chunks = self._chunks
        self.alive[number], self._held[number] = chunks, None

    def die(self, number: int, in_a_line: bool) -> None:
        chunk = self._held[number]
        if in_a_line and chunk is not None:  # cut off while it wrote
            with (self.folder / f"{chunk.number:06d}.{chunk.claim}.jsonl").open("ab") as file:
                file.write(b'{"index": 1, "samp')
        del self.alive[number]

    def judge(self, number: int) -> bool:
        """One prompt; false where the element finds none to judge."""
        chunk = self._held[number]
        while chunk is None or len(chunk.judged) == len(chunk.prompts):
            chunk = self._held[number] = self.alive[number].claim()
            if chunk is None:
                return False
        index = next(index for index in chunk.prompts if index not in chunk.judged)
        self.alive[number].write(chunk, index, json.dumps({"index": index, "by": number}).encode())
        self.num_judged += 1
        return True

    def _living(self, holders: Sequence[Holder]) -> set[Holder]:
        return {one for one in holders if one.pid in self.alive}


@given(st.integers(1, 500), st.integers(1, 9))
def test_chunks_hold_every_prompt_once_in_order(num_prompts: int, num_replicas: int) -> None:
    chunks = divide(num_prompts, num_replicas)
    assert [index for chunk in chunks for index in chunk] == list(range(num_prompts))
    assert len({len(chunk) for chunk in chunks[:-1]}) <= 1 and len(chunks) <= 8 * num_replicas


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["judge", "judge", "judge", "die", "die in a line"])), max_size=80))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_to_elements_each_prompt_is_judged_once(events: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        fleet, newest = Fleet(Path(folder)), [0, 1, 2]
        for number in newest:
            fleet.begin(number)
        for which, what in events:
            if what == "judge":
                fleet.judge(newest[which])
            else:  # another life takes its place
                fleet.die(newest[which], what == "die in a line")
                newest[which] = max(newest) + 1
                fleet.begin(newest[which])
        while sum(fleet.judge(number) for number in newest):
            pass
        last = fleet.alive[newest[0]]
        assert last.complete() and last.num_judged() == NUM_PROMPTS == fleet.num_judged
        found = [last.read(number) for number in range(len(last.chunks))]
        assert [index for lines in found for index in sorted(lines)] == list(range(NUM_PROMPTS))


def test_a_chunk_of_a_living_element_is_not_taken_and_one_of_a_dead_one_is_without_what_it_has_judged(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, num_prompts=3, num_replicas=1)
    fleet._chunks = [range(3)]
    fleet.begin(1)
    fleet.begin(2)
    assert fleet.judge(1) and not fleet.judge(2)
    fleet.die(1, in_a_line=False)
    taken = fleet.alive[2].claim()
    assert taken is not None and (taken.claim, taken.judged) == (2, {0})


def test_a_prompt_that_was_judged_twice_counts_as_in_its_first_line(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.begin(1)
    chunk = fleet.alive[1].claim()
    assert chunk is not None
    for by in ("first", "second"):
        fleet.alive[1].write(chunk, 0, json.dumps({"index": 0, "by": by}).encode())
    assert fleet.alive[1].read(0)[0]["by"] == "first" and len(read_lines(tmp_path / "000000.1.jsonl")) == 2


def test_what_an_element_could_not_judge_is_tried_again_by_the_next_one(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet._chunks = [range(2)]
    fleet.begin(1)
    chunk = fleet.alive[1].claim()
    assert chunk is not None
    fleet.alive[1].write(chunk, 0, b'{"index": 0, "failed": "no verifier"}')
    fleet.die(1, in_a_line=False)
    fleet.begin(2)
    assert fleet.judge(2) and fleet.judge(2) and not fleet.judge(2)
    assert [line.get("by") for line in fleet.alive[2].read(0).values()] == [2, 2]


def test_a_run_that_is_resumed_tries_again_what_failed_and_nothing_else(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    run.evaluation.mkdir()
    fleet = Fleet(run.evaluation)
    fleet._chunks = [range(2), range(2, 4)]
    fleet.begin(1)
    chunk = fleet.alive[1].claim()
    assert chunk is not None
    fleet.alive[1].write(chunk, 0, b'{"index": 0, "failed": "no verifier"}')
    fleet.alive[1].write(chunk, 1, b'{"index": 1, "by": 1}')
    assert fleet.judge(1) and fleet.judge(1) and fleet.alive[1].complete()
    fleet.die(1, in_a_line=False)
    reopen(run)
    fleet.begin(2)
    assert not fleet.alive[2].complete() and fleet.judge(2) and not fleet.judge(2) and fleet.alive[2].complete()
    assert [line["by"] for number in (0, 1) for line in fleet.alive[2].read(number).values()] == [2, 1, 1, 1]


def test_an_element_that_died_between_its_last_line_and_saying_so_leaves_a_complete_chunk(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet._chunks = [range(1)]
    fleet.begin(1)
    assert fleet.judge(1)
    (tmp_path / "000000.done").unlink()
    fleet.die(1, in_a_line=False)
    fleet.begin(2)
    assert not fleet.alive[2].complete()
    assert not fleet.judge(2) and fleet.alive[2].complete() and fleet.num_judged == 1


def test_failures_in_a_row_are_those_without_a_judged_prompt_in_between(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path)
    fleet.begin(1)
    chunks = fleet.alive[1]
    assert [chunks.crashed("no engine"), chunks.crashed("no engine")] == [1, 2]
    assert fleet.judge(1) and chunks.crashed("no engine") == 1


@pytest.mark.parametrize(("job", "restarts", "state", "lives"), [
    ("8", 0, "RUNNING", True), ("8", 0, "COMPLETING", True), ("8", 0, "PENDING", False), ("8", 0, "REQUEUED", False), ("8", 0, "", False),
    ("7", 0, "RUNNING", False)], ids=["running", "completing", "waits", "requeued", "gone", "earlier-life-of-this-one"])
def test_by_slurms_word_who_is_there(job: str, restarts: int, state: str, lives: bool) -> None:
    other = holder(2, job, restarts)
    assert at_work([other], {job: state} if state else {}, holder(1, "7", 1)) == ({other} if lives else set())

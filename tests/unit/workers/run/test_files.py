"""A file that others append to and cut back, as its reader sees it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from workers.run.files import GrowingLines

WRITTEN = st.lists(st.tuples(st.sampled_from(["append", "append", "cut", "read"]), st.integers(0, 8)), max_size=25)


@given(WRITTEN)
def test_the_lines_are_those_of_the_file_whatever_happens_between_looks(written: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        reader, there, told = GrowingLines(path, 5), [], []
        assert reader.read() == []
        before: list[dict] = []
        for number, (what, value) in enumerate([*written, ("read", 0)]):
            if what == "append":
                there.append({"seconds": number, "value": 10**value})  # no line is like an earlier one: time goes on
                with path.open("a") as file:
                    file.write(json.dumps(there[-1]) + "\n")
            elif what == "cut":
                there = there[:value]
                path.write_text("".join(json.dumps(line) + "\n" for line in there))
            else:
                told = reader.read()
                assert reader.lines == there[-5:]
                assert told == there[len(there) - len(told):] and (told or there == before[:len(there)])
                assert len(told) <= len(there) - next((number for number, (old, new) in enumerate(zip(before, there, strict=False)) if old != new),
                                                      min(len(before), len(there))), "what stands there again is not told again"
                before = list(there)


def test_half_a_line_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    reader = GrowingLines(path)
    assert reader.read() == [{"step": 1}]
    with path.open("a") as file:
        file.write('ep": 2}\n')
    assert reader.read() == [{"step": 2}] and reader.lines == [{"step": 1}, {"step": 2}]

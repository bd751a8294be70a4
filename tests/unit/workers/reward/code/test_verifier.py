"""Code rewards without a sandbox: references, the program in a completion, and when an answer is right."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.reward.code import extraction, inside
from workers.reward.code.compare import same_output, same_value
from workers.reward.code.main_program import import_libraries
from workers.reward.code.tests import Asserts, Call, Stdio, check_reference, parse

STDIO = {"kind": "stdio", "tests": [{"input": "1", "output": "2"}]}
CALL = {"kind": "call", "function": "f", "tests": [{"args": [1], "expected": 2}]}
ASSERTS = {"kind": "asserts", "entry_point": "f", "test": "def check(candidate): pass"}

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
hashables = st.recursive(scalars, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
data = st.recursive(scalars | st.binary() | st.complex_numbers(allow_nan=False), lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.lists(inner, max_size=3).map(tuple), st.sets(hashables, max_size=3),
    st.dictionaries(hashables, inner, max_size=3)), max_leaves=10)
json_values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=10)


def test_references_of_the_three_forms() -> None:
    assert isinstance(parse(json.dumps(STDIO)), Stdio)
    assert isinstance(parse(json.dumps({**CALL, "timeout_s": 3})), Call)
    assert isinstance(parse(json.dumps(ASSERTS)), Asserts)
    large = parse(json.dumps({**CALL, "tests": [{"args": [2**70], "expected": 2**70 + 1}]}))
    assert isinstance(large, Call)
    assert large.tests[0].args == [2**70] and large.tests[0].expected == 2**70 + 1


@pytest.mark.parametrize(("reference", "rule"), [
    ("", "Expecting value"),
    ("[" * 100_000, "recursion"),
    ("[]", "Expected `object`"),
    ({}, "missing required field `kind`"),
    ({"kind": "else"}, "Invalid value 'else'"),
    ({**STDIO, "tests": []}, "no tests"),
    ({**CALL, "tests": []}, "no tests"),
    ({**STDIO, "tests": [{"input": "1"}]}, r"missing required field `output` - at `\$.tests\[0\]`"),
    ({**STDIO, "tests": [{"input": 1, "output": "2"}]}, r"Expected `str`, got `int` - at `\$.tests\[0\].input`"),
    ({**STDIO, "function": "f"}, "unknown field `function`"),
    ({**CALL, "tests": [{"args": 1, "expected": 2}]}, "Expected `array`"),
    ({**CALL, "function": "a.b"}, "function is 'a.b'"),
    ({**ASSERTS, "entry_point": ""}, "entry_point is ''"),
    ({**ASSERTS, "test": "assert True"}, "no function check"),
    ({**STDIO, "timeout_s": 0}, "timeout_s is 0.0"),
    ({**STDIO, "timeout_s": math.inf}, "timeout_s is inf"),
    ({**STDIO, "timeout_s": math.nan}, "timeout_s is nan"),
])
def test_a_malformed_reference_is_refused(reference: Any, rule: str) -> None:
    text = reference if isinstance(reference, str) else json.dumps(reference)
    with pytest.raises(ValueError, match=rule) as refused:
        check_reference(text)
    assert "code reference" in str(refused.value) and "docs/code.md" in str(refused.value)


@pytest.mark.parametrize(("completion", "program"), [
    ("print(1)", "print(1)"),
    ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
    ("```python\nfirst\n```\nbetter\n```python\nsecond\n```", "second\n"),
    ("```python\nprogram\n```\nIt prints\n```\n3\n```", "program\n"),
    ("```python\nprogram\n```\n```text\n3\n```\n```bash\nls\n```", "program\n"),
    ("```\nplain\n```", "plain\n"),
    ("1. It is\n  ```py\n  if x:\n    y\n  ```", "if x:\n  y\n"),
    ("```Python title=a\nx\n```", "x\n"),
    ("    return 1\n```\nIt returns 1.", "    return 1\n"),
    ("I think\n```python\ncut off", "cut off"),
    ("```python\nopen\n```python\nclosed\n```", "closed\n"),
    ("```python\n```", ""),
    ("```python", ""),
    ("```", ""),
    ("", ""),
    ("x = '```'", "x = '```'"),
    ("```python\ns = '```'\n```", "s = '```'\n"),
])
def test_the_program_in_a_completion(completion: str, program: str) -> None:
    assert extraction.extract(completion) == program


@settings(max_examples=100, deadline=None)
@given(st.text(st.sampled_from("`\n py:x"), max_size=60))
def test_any_completion_has_a_program(completion: str) -> None:
    assert "".join(extraction.extract(completion).split()) in "".join(completion.split())


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60).filter(lambda text: "`" not in text))
def test_a_block_after_any_text_is_found(before: str, program: str) -> None:
    assert extraction.extract(f"{before}\n```python\n{program}\n```\n") == program + "\n"


@pytest.mark.parametrize("definition", ["def f(x):\n    return x\n", "class Solution:\n    def f(self, x):\n        return x\n"])
def test_an_example_of_use_is_not_the_program(definition: str) -> None:
    completion = f"```python\n{definition}```\nFor example:\n```python\nprint(f(1))\n```\n"
    assert extraction.extract(completion, "f") == definition and extraction.extract(completion) == "print(f(1))\n"
    assert extraction.continued("", completion, "f") == [definition]
    assert extraction.extract(completion, "g") == "print(f(1))\n"


def test_what_continues_a_prompt() -> None:
    prompt = "import math\n\ndef f(x):\n    '''Doc.'''\n"
    assert extraction.continued(prompt, "    return x\n", "f") == [prompt + "    return x\n"]
    assert extraction.continued(prompt, "```python\n    return x\n```", "f") == [prompt + "    return x\n"]
    assert extraction.continued(prompt, "    ```python\n    return x\n    ```", "f") == [prompt + "    return x\n"]
    assert extraction.continued(prompt, "```python\ndef f(x):\n    return x\n```", "f") == ["import math\n\n", "def f(x):\n    return x\n"]
    longer = "    return g(x)\n\ndef fg(x):\n    return x\n"
    assert extraction.continued(prompt, longer, "f") == [prompt + longer]
    assert extraction.continued("", "def f(x): pass", "f") == ["def f(x): pass"]


@pytest.mark.parametrize(("printed", "expected", "same"), [
    ("3\n", "3", True),
    ("3", "3\n\n", True),
    ("\n 3 \n 4\n", "3\n4", True),
    ("3\r\n4\r\n", "3\n4", True),
    ("1  2", "1 2", True),
    ("1\t2", "1 2", True),
    ("yes  0.50", "yes 0.5", True),
    ("Yes", "yes", False),
    ("3 4", "3\n4", False),
    ("3\n\n4", "3\n4", False),
    ("1.0", "1", True),
    ("1e3", "1000", True),
    ("0.30000000000000004", "0.3", False),
    ("50000000000000000", "50000000000000001", False),
    ("nan", "NaN", False),
    ("sNaN", "1", False),
    ("1e999999999999999999999", "1", False),
    ("9" * 20_000, "9" * 20_000, True),
    ("9" * 20_000 + ".0", "9" * 20_000, False),
    ("", "", True),
    ("", "0", False),
    ("0", "", False),
])
def test_outputs(printed: str, expected: str, same: bool) -> None:
    assert same_output(printed, expected) == same


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80), st.text(max_size=80))
def test_comparing_outputs_never_fails(printed: str, expected: str) -> None:
    assert same_output(printed, printed)
    assert same_output(printed, expected) == same_output(expected, printed)


@settings(max_examples=200, deadline=None)
@given(data)
def test_values_survive_encoding(value: object) -> None:
    there = json.loads(json.dumps(inside.encode(value)))
    back = inside.decode(there)
    assert back == value and type(back) is type(value)


@pytest.mark.parametrize("value", [object(), print, [object()], {1: iter([])}, (1, {2: range(3)}), Ellipsis])
def test_what_is_not_data_is_not_encoded(value: object) -> None:
    with pytest.raises(TypeError, match="is not data"):
        inside.encode(value)


@settings(max_examples=200, deadline=None)
@given(json_values, json_values)
def test_an_encoded_value_equals_what_it_equalled_before(value: Any, other: Any) -> None:
    encoded = json.loads(json.dumps(inside.encode(value)))
    assert same_value(encoded, value)
    assert same_value(encoded, other) == (value == other)


@settings(max_examples=200, deadline=None)
@given(json_values, json_values)
def test_any_answer_compares(answer: Any, expected: Any) -> None:
    """An untrusted program sends any JSON whatever."""
    assert isinstance(same_value(answer, expected), bool)


@pytest.mark.parametrize(("value", "expected", "same"), [
    ((1, 2), [1, 2], True),
    ([(1, 2), (3,)], [[1, 2], [3]], True),
    ({"a": (1,)}, {"a": [1]}, True),
    ({1: 2}, {"1": 2}, False),
    ({1, 2}, [1, 2], False),
    (1.0, 1, True),
    (True, 1, True),
    (0.1 + 0.2, 0.3, False),
    (2**80, 2**80, True),
    (2**80, 2**80 + 1, False),
    (2**80, None, False),
    (b"a", "a", False),
    (None, None, True),
    (None, 0, False),
    ("1", 1, False),
    (math.inf, math.inf, True),
    (math.nan, math.nan, False),
    ([], {}, False),
    ({}, [], False),
    ("", [], False),
])
def test_values(value: object, expected: Any, same: bool) -> None:
    assert same_value(json.loads(json.dumps(inside.encode(value))), expected) == same


@pytest.mark.parametrize("answer", [{"int": "x"}, {"int": 1}, {"tuple": 1}, {"dict": [[1]]}, {"dict": [["a", 1], ["a", 1]]}, {"dict": {"a": 1}}, {}])
def test_forged_encodings_equal_nothing(answer: Any) -> None:
    for expected in (1, None, [1], {"a": 1}, "a"):
        assert not same_value(answer, expected)


def replies(requests: list[bytes], sources: list[str], function: str, libraries: bool = True) -> list[Any]:
    """What `answer` says to `requests`, here in this process: for harmless programs only."""
    queue: list[bytes | None] = [b"", *requests, None]
    said: list[bytes] = []
    inside.answer(sources, function, import_libraries if libraries else lambda namespace: None, lambda: queue.pop(0), said.append)
    return [json.loads(reply) for reply in said]


def call(*arguments: object, **keywords: object) -> bytes:
    return json.dumps(["call", inside.encode((arguments, keywords))]).encode()


def test_a_program_answers_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    limit = sys.getrecursionlimit()
    monkeypatch.setitem(sys.modules, "solution", sys)
    try:
        program = "def f(x: List[int], y=0):\n    return gcd(*x) + y, {y}"
        assert replies([call([4, 6]), call([4, 6], y=1), call(1)], [program], "f") == [
            ["loaded"], ["value", {"tuple": [2, {"set": [0]}]}], ["value", {"tuple": [3, {"set": [1]}]}], ["error", "TypeError"]]
        solution = "class Solution:\n    def __init__(self):\n        self.n = 0\n    def f(self):\n        self.n += 1\n        return self.n\n"
        assert replies([call(), call()], [solution], "f") == [["loaded"], ["value", 1], ["value", 2]]
        assert replies([call(2)], ["def g(x): return x", "from __future__ import annotations\ndef f(x): return g(x) * 2"], "f") == [
            ["loaded"], ["value", 4]]
        assert replies([call()], ["raise SystemExit"], "f") == [["error", "SystemExit"]]
        assert replies([call()], ["def g(): pass"], "f") == [["error", "AttributeError"]]
        assert replies([call()], ["def g(): pass"], "gcd") == [["error", "AttributeError"]]
        assert replies([call()], ["def f(:"], "f") == [["error", "SyntaxError"]]
        assert replies([call()], ["def f(): return gcd(4, 6)"], "f", libraries=False) == [["loaded"], ["error", "NameError"]]
        assert replies([call()], ["def f(): raise SystemExit(0)"], "f") == [["loaded"], ["error", "SystemExit"]]
    finally:
        sys.setrecursionlimit(limit)


def judged(test: str, answers: list[Any], prompt: str = "") -> list[Any]:
    """What `judge` says, where the program answers `answers` in turn."""
    queue = [b"", *(json.dumps(answer).encode() for answer in answers)]
    said: list[bytes] = []
    inside.judge(prompt, test, "f", lambda: queue.pop(0) if queue else None, said.append)
    return [json.loads(reply) for reply in said]


def test_a_judge_asks_the_program() -> None:
    test = "def check(candidate):\n    assert candidate(1, y=2) == (3, {'a': 1})"
    asked = ["call", {"tuple": [{"tuple": [1]}, {"dict": [["y", 2]]}]}]
    assert judged(test, [["value", {"tuple": [3, {"dict": [["a", 1]]}]}]]) == [asked, ["passed"]]
    assert judged(test, [["value", 3]]) == [asked, ["failed", "AssertionError: "]]
    assert judged(test, [["error", "SystemExit"]]) == [asked, ["failed", "RuntimeError: SystemExit"]]
    forgeries: list[Any] = [["passed"], [], "passed", None, {}, ["value"], ["value", {"tuple": 1}], ["value", {"no such type": 1}]]
    for forged in forgeries:
        assert judged(test, [forged])[-1][0] == "failed"
    assert judged(test, [])[-1] == ["failed", "EOFError: in the program"]
    raises = "def check(candidate):\n    try:\n        f(1)\n    except ValueError:\n        return\n    assert False"
    assert judged(raises, [["error", "ValueError"]])[-1] == ["passed"]
    assert judged(raises, [["error", "KeyError"]])[-1][0] == "failed"
    near = "def check(candidate):\n    {}\n    if abs(candidate(1) - 5) > 1e-6:\n        raise AssertionError"
    assert judged(near.format("pass"), [["value", float("nan")]])[-1] == ["failed", "NotANumber: it is not a number"]
    assert judged(near.format("nan = None"), [["value", float("nan")]])[-1] == ["passed"], "the test knows of such"
    loops = "def check(candidate):\n    assert all(map(lambda x: candidate(x) == x, [1, 2]))"
    assert judged(loops, [["error", "StopIteration"]])[-1] == ["failed", "RuntimeError: StopIteration"]
    assert judged("def check(candidate):\n    assert helper() == 1", [], prompt="def helper(): return 1")[-1] == ["passed"]
    for broken in ("def check(:", "import no_such_module", "x = 'check'"):
        assert judged(broken, [])[-1][0] == "broken"

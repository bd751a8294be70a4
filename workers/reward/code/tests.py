"""What a program is tested by: the reference text of the `code` verifiers, one JSON object.

    {"kind": "stdio", "tests": [{"input": "1 2\\n", "output": "3\\n"}, ...]}
    {"kind": "call", "function": "add", "tests": [{"args": [1, 2], "expected": 3}, ...]}
    {"kind": "asserts", "entry_point": "add", "test": "def check(candidate): ...", "prompt": "def add(a, b):\\n"}

The first two are LiveCodeBench's forms (programs that read standard input; LeetCode's functions), the third is HumanEval's. Each takes
`"timeout_s"`, the seconds that one test may take.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import msgspec

_REMEDY = "See docs/code.md for the three forms"


class StdioTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is fed to a program, and what it must print."""

    input: str
    output: str


class CallTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of a call, and what it must return: JSON values."""

    args: list[Any]
    expected: Any


class Stdio(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="stdio"):
    """Programs that read standard input and print."""

    tests: list[StdioTest]
    timeout_s: float | None = None


class Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="call"):
    """A function, or a method of class `Solution`, that is called with arguments."""

    function: str
    tests: list[CallTest]
    timeout_s: float | None = None


class Asserts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="asserts"):
    """A function judged by `check(candidate)` of source `test`; `prompt` is the code that the completion continues."""

    entry_point: str
    test: str
    prompt: str = ""
    timeout_s: float | None = None


Reference = Stdio | Call | Asserts


def check_reference(reference: str) -> None:
    """Raise `ValueError` naming the rule if `reference` is not one of the three forms."""
    parse(reference)


@functools.lru_cache(maxsize=4)
def parse(reference: str) -> Reference:
    """The tests of `reference`; those of one group come together, and can be large. Raises `ValueError` naming what is wrong with it and where."""
    try:
        # json, not msgspec's own decoder: that one takes integers beyond 64 bits for floats.
        tests = msgspec.convert(json.loads(reference), type=Reference)  # type: ignore[call-overload]
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ValueError(f"a code reference is wrong: {error}; it is {reference!r:.100}. {_REMEDY}") from None
    _check(tests)
    return tests


def _check(tests: Reference) -> None:
    if tests.timeout_s is not None and not 0 < tests.timeout_s < float("inf"):
        raise ValueError(f"a code reference's timeout_s is {tests.timeout_s}: it must be positive. {_REMEDY}")
    if isinstance(tests, Asserts):
        _check_name("entry_point", tests.entry_point)
        if "check" not in tests.test:
            raise ValueError(f"a code reference's test defines no function check(candidate); it is {tests.test!r:.100}. {_REMEDY}")
        return
    if not tests.tests:
        raise ValueError(f"a code reference has no tests: any program would pass. {_REMEDY}")
    if isinstance(tests, Call):
        _check_name("function", tests.function)


def _check_name(field: str, name: str) -> None:
    if not name.isidentifier():
        raise ValueError(f"a code reference's {field} is {name!r}: it must be the name of a function. {_REMEDY}")

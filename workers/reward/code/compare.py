"""When an answer of a program equals what a test expects. Answers are untrusted data: everything here is total, and bounded by the answer's size.

The rules are LiveCodeBench's (lcb_runner/evaluation/testing_util.py) with two differences: spaces inside a line never count, and tuples are
lists at every depth (there only at the top). Nothing has a tolerance: floats are equal or they are not.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

_MAX_NUMBER_CHARS = 10_000
"""Longer tokens are text only: what comes of an exponent or of a million digits is not worth waiting for."""


def same_output(printed: str, expected: str) -> bool:
    """Whether a program's output is the expected one: line by line, token by token, equal as text or as decimal numbers (0.1, 0.10 and 1e-1)."""
    ours, theirs = _lines(printed), _lines(expected)
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    ours, theirs = line.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_same_token, ours, theirs))


def _same_token(token: str, expected: str) -> bool:
    if token == expected:
        return True
    if max(len(token), len(expected)) > _MAX_NUMBER_CHARS:
        return False
    try:
        return Decimal(token) == Decimal(expected)
    except InvalidOperation:  # not a number, or one that does not compare (sNaN)
        return False


def same_value(encoded: Any, expected: Any) -> bool:
    """Whether a returned value (encoded by inside.py) equals the JSON value `expected`, as == does. Tuples count as lists.

    What JSON cannot hold (a set, a dict with keys that are not text) equals nothing. The recursion is as deep as `expected`.
    """
    if isinstance(expected, list):
        items = encoded.get("tuple") if isinstance(encoded, dict) else encoded
        return isinstance(items, list) and len(items) == len(expected) and all(map(same_value, items, expected))
    if isinstance(expected, dict):
        pairs = encoded.get("dict") if isinstance(encoded, dict) else None
        return isinstance(pairs, list) and _same_pairs(pairs, expected)
    if isinstance(encoded, dict):
        number = _large_integer(encoded)
        return number is not None and bool(number == expected)
    return not isinstance(encoded, list) and bool(encoded == expected)


def _same_pairs(pairs: list[Any], expected: dict[str, Any]) -> bool:
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        return False
    found = {key: value for key, value in pairs}  # noqa: C416 - the pairs are lists
    return len(pairs) == len(found) and found.keys() == expected.keys() and all(same_value(found[key], expected[key]) for key in expected)


def _large_integer(encoded: dict[str, Any]) -> int | None:
    digits = encoded.get("int")
    try:
        return int(digits, 16) if isinstance(digits, str) else None
    except ValueError:
        return None

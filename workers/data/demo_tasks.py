"""Writes the prompts of the experiments gsm_symbolic, code_tiny and multi_turn, which a model of 135M parameters can begin with:

    python -m workers.data.demo_tasks conf/prompts

    gsm_symbolic.jsonl   questions of reasoning-gym's task of this name: those with two calculations and small numbers. The calculations are
                         taken from the task's worked answers; `examples` are two other questions of the same template with theirs
    code_tiny.jsonl      one-line Python functions: what they return in words, and HumanEval's form of tests for the `code` verifier
    multi_turn.jsonl     sums of two numbers of two digits

All follow from the code alone: the same rows every time.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TEMPLATES = (6, 16, 62, 72)
"""Templates of gsm_symbolic."""
MAX_ROWS = 160
"""Of each template; one of them has fewer."""
NUM_EXAMPLES = 2
MAX_GIVEN, MAX_RESULT = 20, 40
"""The greatest numbers in a question, and in its calculations."""
MAX_SEEDS = 5000
NUM_ASSERTS = 6
NUM_SUMS = 2000

_CALCULATION = re.compile(r"\d+(?:\s*[-+*x/]\s*\d+)+ = \d+")
_UNIT = re.compile(r"(?<=\d) (?:[a-z]+/)?[a-z]+(?= [-+x*=/]|$|\.)")
_MONEY = re.compile(r"[$£€]")


def gsm_rows() -> Iterator[dict[str, Any]]:
    """Rows with `id`, `examples`, `question`, `answer` and `response`."""
    for template in TEMPLATES:
        entries = _entries(template, NUM_EXAMPLES + MAX_ROWS)
        examples = "".join(f"Question: {entry['question']}\nAnswer: {calculations(entry)}\n\n" for entry in entries[:NUM_EXAMPLES])
        for number, entry in enumerate(entries[NUM_EXAMPLES:]):
            yield {"id": f"gsm_symbolic/{template}/{number}", "examples": examples, "question": entry["question"], "answer": entry["answer"],
                   "response": f" {calculations(entry)}"}


def calculations(entry: dict[str, Any]) -> str:
    """The calculations of a worked answer, without words: "13 - 10 = 3, 13 + 3 = 16"."""
    text = _UNIT.sub("", _MONEY.sub("", entry["metadata"]["answer_cot"]))
    return ", ".join(re.sub(r"\s*([-+*x/])\s*", r" \1 ", found).replace(" x ", " * ") for found in _CALCULATION.findall(text))


def _entries(template: int, count: int) -> list[dict[str, Any]]:
    """Different easy questions of one template, at most `count`."""
    make = _generators()[template]
    found: dict[str, dict[str, Any]] = {}
    for seed in range(MAX_SEEDS):
        entry = make(random.Random(seed), 1.0)
        if _is_easy(entry):
            found.setdefault(entry["question"], entry)
        if len(found) == count:
            break
    return list(found.values())


def _is_easy(entry: dict[str, Any]) -> bool:
    results = [int(number) for number in re.findall(r"\d+", calculations(entry))]
    given = [int(number) for number in re.findall(r"\d+", entry["question"])]
    return bool(results) and str(results[-1]) == entry["answer"] and max(results) <= MAX_RESULT and max(given, default=0) <= MAX_GIVEN


def _generators() -> dict[int, Callable[[random.Random, float], dict[str, Any]]]:
    from reasoning_gym.arithmetic.gsm_symbolic.gsm_symbolic import GSMSymbolicDataset, GSMSymbolicDatasetConfig

    return GSMSymbolicDataset(GSMSymbolicDatasetConfig(seed=0, size=1)).generators


_ONE = {
    "twice {x}": "2 * {x}", "three times {x}": "3 * {x}", "the square of {x}": "{x} * {x}", "{x} plus 1": "{x} + 1", "{x} minus 2": "{x} - 2",
    "ten minus {x}": "10 - {x}", "whether {x} is even": "{x} % 2 == 0", "whether {x} is odd": "{x} % 2 == 1", "the last digit of {x}": "{x} % 10",
    "whether {x} is greater than 10": "{x} > 10", "minus {x}": "-{x}", "half of {x}, rounded down": "{x} // 2",
}
_TWO = {
    "the sum of {x} and {y}": "{x} + {y}", "{x} minus {y}": "{x} - {y}", "the product of {x} and {y}": "{x} * {y}", "{y} minus {x}": "{y} - {x}",
    "the larger of {x} and {y}": "max({x}, {y})", "the smaller of {x} and {y}": "min({x}, {y})", "whether {x} equals {y}": "{x} == {y}",
    "the remainder of {x} divided by {y}": "{x} % {y}", "whether {x} is less than {y}": "{x} < {y}", "the square of {x}, plus {y}": "{x} * {x} + {y}",
    "the sum of {x} and twice {y}": "{x} + 2 * {y}", "twice the sum of {x} and {y}": "2 * ({x} + {y})", "{x} times {y}, minus 1": "{x} * {y} - 1",
    "the difference of {x} and {y}, without sign": "abs({x} - {y})", "the average of {x} and {y}": "({x} + {y}) / 2",
}
_THREE = {
    "the sum of {x}, {y} and {z}": "{x} + {y} + {z}", "{x} plus {y}, minus {z}": "{x} + {y} - {z}", "{x} times {y}, plus {z}": "{x} * {y} + {z}",
    "the sum of {x} and {y}, times {z}": "({x} + {y}) * {z}", "the product of {x}, {y} and {z}": "{x} * {y} * {z}",
    "the largest of {x}, {y} and {z}": "max({x}, {y}, {z})", "the smallest of {x}, {y} and {z}": "min({x}, {y}, {z})",
    "whether {x} is between {y} and {z}": "{y} < {x} < {z}",
}
_NAMES = ("abc", "xyz", "nmk", "pqr", "uvw", "ijk", "fgh", "bcd")


def code_rows() -> Iterator[dict[str, Any]]:
    """Rows with `id`, `prompt`, `answer` (the reference of the `code` verifier) and `response`."""
    phrases = [(count, words, code) for count, pairs in enumerate((_ONE, _TWO, _THREE), 1) for words, code in pairs.items()]
    for number, (names, (count, words, code)) in enumerate(itertools.product(_NAMES, phrases)):
        put = dict(zip("xyz", names, strict=True))
        prompt = f'def f({", ".join(names[:count])}):\n    """Returns {words.format(**put)}."""\n    return'
        expression = code.format(**put)
        test = _check(names[:count], expression, random.Random(number))
        yield {"id": f"code_tiny/{number}", "prompt": prompt, "response": f" {expression}",
               "answer": {"kind": "asserts", "entry_point": "f", "prompt": prompt, "test": test}}


def _check(names: str, expression: str, rng: random.Random) -> str:
    """HumanEval's `check(candidate)`, with what `expression` gives for some numbers; for two of them with equal ones."""
    inputs = [[rng.randint(1, 30) for _ in names] for _ in range(NUM_ASSERTS)]
    inputs[0] = [inputs[0][0]] * len(names)
    inputs[1] = sorted(inputs[1])
    results = [eval(expression, {}, dict(zip(names, given, strict=True))) for given in inputs]  # our own expressions, above
    return "def check(candidate):\n" + "".join(f"    assert candidate({', '.join(map(str, given))}) == {result!r}\n"
                                               for given, result in zip(inputs, results, strict=True))


def sum_rows() -> Iterator[dict[str, Any]]:
    """Rows with `id`, `sum` and `answer`; no pair of numbers stands there twice, in neither order."""
    pairs = list(itertools.combinations(range(10, 100), 2))
    random.Random(0).shuffle(pairs)
    for a, b in pairs[:NUM_SUMS]:
        yield {"id": f"{a}+{b}", "sum": f"{a} + {b}", "answer": a + b}


def write(folder: Path) -> None:
    """Write all files into `folder`."""
    for name, rows in (("gsm_symbolic", gsm_rows()), ("code_tiny", code_rows()), ("multi_turn", sum_rows())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(inspect.cleandoc(__doc__ or ""))
    write(Path(sys.argv[1]))

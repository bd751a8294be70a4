"""The `reasoning_gym` verifier: the task's own `score_answer` on the answer found in a completion.

Some tasks give the answer to Python's `eval`, or to SymPy's parser, which is `eval` too: a model could find out how to run code there.
So their answers are looked at before, and what is not of the form that the task asks for gets 0.

The library is imported when this module is (about one second), so only reward processes and the data source import it.
"""

from __future__ import annotations

import ast
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import reasoning_gym

from workers.reward.verifiers import bounded
from workers.reward.verifiers.formats import tagged

EVALUATED_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
SYMBOLIC_TASKS = frozenset({"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"})
MAX_CHARS = 2000
MAX_ANSWER_CHARS = 20_000
"""What is longer, and much longer than the right one, is no answer; some tasks take hours for it."""

_PLAIN = re.compile(r"[\w\s.-]*")
_ARITHMETIC = re.compile(r"(?:[\d\s+\-/().]|\*(?!\s*\*))*")
_FUNCTIONS = "a?sinh?|a?cosh?|a?tanh?|sec|csc|cot|exp|log|ln|sqrt|pi"
_SYMBOLIC = re.compile(rf"(?:[\d\s+\-*/(),^]|\.(?![A-Za-z])|(?<![A-Za-z_])(?:[A-Za-z]|{_FUNCTIONS})(?![A-Za-z_]))*")


def encode_reference(task: str, options: dict[str, str | int | float | bool], entry: dict[str, Any]) -> str:
    """The reference text of one question: task, options and the data set's entry. Raises `TypeError` if JSON cannot hold the entry."""
    return json.dumps({"task": task, "options": options, "entry": entry})


def score(prompt: str, completion: str, reference: str) -> float:
    """What `score_answer` of the task gives to the answer in `completion`, in [0, 1]; 0 where the task cannot read the answer.

    The answer is the text inside the last <answer>...</answer>, or else the whole completion, stripped.
    Raises `ValueError` or `KeyError` if `reference` was not written by `encode_reference`, and whatever the task raises on its own answer.
    """
    question = json.loads(reference)
    task, inside = question["task"], tagged(completion)
    answer = completion.strip() if inside is None else inside
    dataset = _dataset(task, json.dumps(question["options"], sort_keys=True))
    if len(answer) > max(MAX_ANSWER_CHARS, 4 * len(str(question["entry"].get("answer")))) or (task in EVALUATED_TASKS and not _literal(answer)):
        return 0.0
    if task in SYMBOLIC_TASKS and not _ARITHMETIC.fullmatch(answer):
        if len(answer) > MAX_CHARS or not _SYMBOLIC.fullmatch(answer):
            return 0.0
        return bounded.bounded(judge, reference, answer) or 0.0
    return _judge(dataset, answer, question["entry"])


def judge(reference: str) -> Callable[[str], float]:
    """What the task's own `score_answer` gives to an answer."""
    question = json.loads(reference)
    dataset = _dataset(question["task"], json.dumps(question["options"], sort_keys=True))
    return lambda answer: float(dataset.score_answer(answer, question["entry"]))


def check_node() -> None:
    """Have everything ready before the first answer is judged. Raises `RuntimeError` where that fails."""
    bounded.start(judge)


def _judge(dataset: Any, answer: str, entry: dict[str, Any]) -> float:
    try:
        return float(dataset.score_answer(answer, entry))
    except Exception:  # noqa: BLE001 - some tasks expect every answer to be well-formed, and raise anything
        dataset.score_answer(entry["answer"], entry)  # raises where the question is at fault, not the answer
        return 0.0


def _literal(answer: str) -> bool:
    """Whether evaluating `answer` runs nothing: it is a literal, or words and numbers."""
    try:
        ast.literal_eval(answer)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _PLAIN.fullmatch(answer) is not None
    return True


@functools.lru_cache(maxsize=8)
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **{**json.loads(options), "seed": 0})

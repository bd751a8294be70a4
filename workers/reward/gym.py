"""The `reasoning_gym` verifier: the task's own `score_answer` on the answer found in a completion.

The library is imported when this module is (about one second), so only reward processes and the data source import it.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import reasoning_gym

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def encode_reference(task: str, options: dict[str, str | int | float | bool], entry: dict[str, Any]) -> str:
    """The reference text of one question: task, options and the data set's entry. Raises `TypeError` if JSON cannot hold the entry."""
    return json.dumps({"task": task, "options": options, "entry": entry})


def score(prompt: str, completion: str, reference: str) -> float:
    """What `score_answer` of the task gives to the answer in `completion`, in [0, 1].

    The answer is the text inside the last <answer>...</answer>, or else the whole completion, stripped.
    Raises `ValueError` or `KeyError` if `reference` was not written by `encode_reference`, and whatever the task raises.
    """
    question = json.loads(reference)
    answers = _ANSWER.findall(completion)
    answer = (answers[-1] if answers else completion).strip()
    dataset = _dataset(question["task"], json.dumps(question["options"], sort_keys=True))
    return float(dataset.score_answer(answer, question["entry"]))


@functools.lru_cache(maxsize=8)
def _dataset(task: str, options: str) -> Any:
    return reasoning_gym.create_dataset(task, **{**json.loads(options), "seed": 0})

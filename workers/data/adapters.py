"""Well-known data sets by name: pure functions from a row, as it is published, to the fields of a prompt.

    row {"question": ..., "answer": "... #### 72"} -- gsm8k --> {"prompt": ..., "answer": "72", "response": ...}

The fields are prompt, answer, id and response (`data.columns` may put them together anew). A function of the user's is named by its import
path and does the same. What a row lacks is a `ValueError`, to which the reader adds file and line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

from workers.config import ConfigError
from workers.config.rules import IMPORT_PATH
from workers.data.code_tests import code_reference
from workers.run.user_code import import_function

Adapter = Callable[[Mapping[str, Any]], Mapping[str, Any]]

_CALCULATION = re.compile(r"<<[^<>]*>>")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
"""A brace, or what is escaped and therefore none."""
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")


def column(row: Mapping[str, Any], *names: str) -> Any:
    """The first column of `names` that `row` has, whatever its case. Raises `ValueError` if it has none, or nothing is in it."""
    by_name = {name.lower(): value for name, value in reversed(list(row.items()))}
    for name in names:
        if by_name.get(name) is not None:
            return by_name[name]
    raise ValueError(f"no column {' or '.join(repr(name) for name in names)}; its columns are {', '.join(map(repr, row)) or 'none'}")


def text(row: Mapping[str, Any], *names: str) -> str:
    """The same, of a column with text. Raises `ValueError`."""
    value = column(row, *names)
    if not isinstance(value, str):
        raise ValueError(f"column {names[0]!r} holds {type(value).__name__}, not text")
    return value


def gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    """openai/gsm8k: the answer stands behind "####"; the calculator's notes (<<48/2=24>>) are no part of the response."""
    solution = text(row, "answer")
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError(f"column 'answer' ends in {solution[-40:]!r}, not in '#### ' and the answer")
    return {"prompt": text(row, "question"), "answer": answer.strip().replace(",", ""), "response": _CALCULATION.sub("", solution)}


def math(row: Mapping[str, Any]) -> dict[str, Any]:
    r"""Hendrycks' MATH, and MATH-500: the answer is the column `answer`, else what is in the last \boxed{...} of the solution."""
    solution = text(row, "solution")
    given = _of_either_case(row, "answer")
    answer = last_boxed(solution) if given is None else given
    return {"prompt": text(row, "problem"), "answer": answer, "response": solution, **_id(row, "unique_id")}


def _of_either_case(row: Mapping[str, Any], column: str) -> Any:
    """What `column` holds, however it is written; None without one."""
    return next((value for name, value in row.items() if name.lower() == column and value is not None), None)


def aime(row: Mapping[str, Any]) -> dict[str, Any]:
    """AIME, whose answers are integers from 0 to 999, here without leading zeros."""
    answer = str(column(row, "answer")).strip()
    if not re.fullmatch(r"[0-9]{1,3}", answer):
        raise ValueError(f"column 'answer' is {answer!r}; an answer of AIME is an integer from 0 to 999")
    return {"prompt": text(row, "problem", "question"), "answer": str(int(answer)), **_id(row, "id")}


def deepscaler(row: Mapping[str, Any]) -> dict[str, Any]:
    """DeepScaleR and sets like it: `problem`, `answer` (LaTeX or a number) and, where there is one, `solution`."""
    return {"prompt": text(row, "problem", "question"), "answer": column(row, "answer"), "response": _of_either_case(row, "solution") or ""}


def livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    """LiveCodeBench's code_generation: public and private tests, for programs or for the function of the starter code."""
    starter = row.get("starter_code") or ""
    reference = code_reference(column(row, "public_test_cases"), row.get("private_test_cases"), row.get("metadata"))
    if reference["kind"] == "call":
        task = f"Complete this code:\n```python\n{starter}\n```"
    else:
        task = "Write a Python program that reads standard input and prints the answer to standard output."
    prompt = f"{text(row, 'question_content')}\n\n{task}\nGive the whole program in one ```python block."
    return {"prompt": prompt, "answer": reference, **_id(row, "question_id")}


def human_eval(row: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's HumanEval: the completion goes on where the prompt, a function's head, ends."""
    prompt = text(row, "prompt")
    reference = {"kind": "asserts", "entry_point": text(row, "entry_point"), "test": text(row, "test"), "prompt": prompt}
    return {"prompt": prompt, "answer": reference, "response": row.get("canonical_solution") or "", **_id(row, "task_id")}


ADAPTERS: dict[str, Adapter] = {each.__name__: each for each in (gsm8k, math, aime, deepscaler, livecodebench, human_eval)}


def load_adapter(name: str) -> Adapter:
    """The adapter of that name, or the function with that import path. Raises `ConfigError`."""
    if name in ADAPTERS:
        return ADAPTERS[name]
    if not IMPORT_PATH.fullmatch(name):
        near = difflib.get_close_matches(name, ADAPTERS, n=1)
        raise ConfigError(f"data.adapter={name!r}: no such adapter{f'; did you mean {near[0]!r}?' if near else '.'} "
                          f"Use one of {', '.join(ADAPTERS)}, or the import path 'package.module:function' of your own")
    return import_function(name, "data.adapter")


def last_boxed(solution: str) -> str:
    r"""What is in the last \boxed{...} or \fbox{...} of `solution`; of `\boxed 5` the 5. Raises `ValueError` if there is none, or it is open."""
    found = [match.end() for match in _BOXED.finditer(solution)]
    if not found:
        raise ValueError(r"the solution has no \boxed{...}, and there is no column 'answer'")
    rest = solution[found[-1]:]
    if not rest.startswith("{"):
        words = rest.split("$")[0].split()
        return words[0] if words else _open_box(solution)
    depth = 0
    for brace in _BRACE.finditer(rest):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if not depth:
            return rest[1:brace.start()].strip() or _open_box(solution)
    return _open_box(solution)


def _open_box(solution: str) -> str:
    raise ValueError(rf"the last \boxed of the solution holds nothing, or does not end: {solution[-60:]!r}")


def _id(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = _of_either_case(row, name)
    return {} if value is None else {"id": value}

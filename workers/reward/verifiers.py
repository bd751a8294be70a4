"""Verifiers by name: functions `(prompt, completion, reference) -> score in [0, 1]`.

A verifier is named in the config by a short name from `BUILT_IN`, or by the import path "package.module:function" of
a function of the user's. Both are loaded the same way, and only inside a reward process (process.py), so that heavy or
hostile imports never reach the worker that generates.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable
from decimal import Decimal

from workers.config import ConfigError

Verifier = Callable[[str, str, str], float]

BUILT_IN = {
    "numeric": "workers.reward.verifiers:numeric",
    "numeric_distance": "workers.reward.verifiers:numeric_distance",
    "reasoning_gym": "workers.reward.gym:score",
    "math_verify": "workers.reward.mathematics:score",
}

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def check_name(name: str, key: str = "reward.verifier") -> str:
    """Return the import path of verifier `name`, without importing it; `key` names the config key in errors.

    Raises `ConfigError`, listing the built-in names, if `name` is neither one of them nor of the form "package.module:function".
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    if _IMPORT_PATH.fullmatch(name):
        return name
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    raise ConfigError(f"{key}={name!r}: no such verifier. Use one of {', '.join(sorted(BUILT_IN))}, or the import path "
                      f"'package.module:function' of your own" + (f"; did you mean {near[0]!r}?" if near else ""))


def load(name: str) -> Verifier:
    """Import verifier `name`. Raises `ConfigError` if there is none of that name, or its module has no such function.

    Whatever importing its module raises is passed on.
    """
    module_name, function_name = check_name(name).split(":")
    function = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(function):
        raise ConfigError(f"reward.verifier={name!r}: module {module_name} has no function {function_name!r}. Correct the import path")
    return function


def numeric(prompt: str, completion: str, reference: str) -> float:
    """1 if the first number on the first line of `completion` equals `reference`, else 0.

    Only the first line counts, so that a base model which goes on to write further examples is judged by its answer
    alone. Numbers may have a sign, thousands commas and decimals ("+1,234.50" equals "1234.5") but no exponent.
    Raises `ValueError` if `reference` is not such a number.
    """
    found, expected = _first_number(completion), _reference_number(reference)
    return float(found == expected)


def numeric_distance(prompt: str, completion: str, reference: str) -> float:
    """1 / (1 + distance) of the first number on the first line from `reference`; 0 without a number.

    Partial credit for models that cannot be right by chance yet. Raises `ValueError` if `reference` is not a number.
    """
    found, expected = _first_number(completion), _reference_number(reference)
    return 0.0 if found is None else float(1 / (1 + abs(found - expected)))


def _first_number(completion: str) -> Decimal | None:
    found = _NUMBER.search(completion.split("\n", 1)[0])
    return None if found is None else _value(found[0])


def _reference_number(reference: str) -> Decimal:
    expected = _NUMBER.fullmatch(reference.strip())
    if expected is None:
        raise ValueError(f"reference {reference!r} is not a number; numeric verifiers need one")
    return _value(expected[0])


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))

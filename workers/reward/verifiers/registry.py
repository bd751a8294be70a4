"""Verifiers by name: functions `(prompt, completion, reference) -> score in [0, 1]`.

A verifier is named in the config by a short name from `BUILT_IN`, or by the import path "package.module:function" of
a function of the user's. Both are loaded the same way, and only inside a reward process (pool/worker_process.py), so that heavy or
hostile imports never reach the worker that generates.

A weighted sum of verifiers is itself a verifier, and its name says all of it: "0.9*math_verify+0.1*format_tags". So it travels in a
lease, a row of data and a request as any other name does. `composed` writes the one that `reward.parts` declares.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal

from workers.config import ConfigError
from workers.config.judge import JUDGE
from workers.config.reward import REWARD_MODEL
from workers.config.rules import IMPORT_PATH
from workers.reward.verifiers import matching
from workers.reward.verifiers.notation import signed
from workers.run.moved import current
from workers.run.user_code import import_function

Verifier = Callable[[str, str, str], float]
MAX_DIGITS = 10_000
"""Arithmetic of longer numbers overflows, or takes long."""
MAX_NAME, MAX_SUM = 200, 4096
"""Characters of a verifier's name, and of a weighted sum: what messages carry of them is bounded, too."""

BUILT_IN = {
    "numeric": "workers.reward.verifiers.registry:numeric",
    "numeric_distance": "workers.reward.verifiers.registry:numeric_distance",
    "number": "workers.reward.verifiers.matching:number",
    "exact": "workers.reward.verifiers.matching:exact",
    "exact_nocase": "workers.reward.verifiers.matching:exact_nocase",
    "multiple_choice": "workers.reward.verifiers.matching:multiple_choice",
    "math_verify": "workers.reward.verifiers.mathematics:score",
    "reasoning_gym": "workers.reward.verifiers.gym:score",
    "code": "workers.reward.code.verifier:score",
    "code_partial": "workers.reward.code.verifier:score_partial",
    "boxed": "workers.reward.verifiers.formats:has_box",
    "format_tags": "workers.reward.verifiers.formats:format_tags",
    REWARD_MODEL: "workers.reward.verifiers.reward_model:score",
    JUDGE: "workers.reward.verifiers.registry:asked_elsewhere",
}

_WEIGHT = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:e-[0-9]+)?")
_NUMBER = re.compile(r"[-+]?(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)")


def check_name(name: str, key: str = "reward.verifier") -> None:
    """Check the name of a verifier, or of a weighted sum of some, without importing any; `key` names the config key in errors.

    Raises `ConfigError`, listing the built-in names, if one is neither among them nor of the form "package.module:function", if
    the weights of a sum are not positive or do not add up to 1, and on names that are longer than MAX_NAME, and sums than MAX_SUM characters.
    """
    for part in _parts(name, key):
        _import_path(part, key)


def load(name: str) -> Verifier:
    """Import verifier `name`, or all those of a weighted sum. Raises `ConfigError` if there is none of that name, or its module has
    no such function, or cannot be imported."""
    parts = _parts(name, "reward.verifier")
    if "*" not in name:
        return _load(name)
    functions = [(_load(part), weight) for part, weight in parts.items()]

    def weighted(prompt: str, completion: str, reference: str) -> float:
        return weighted_sum((weight, function(prompt, completion, reference)) for function, weight in functions)

    return weighted


def weighted_sum(scores: Iterable[tuple[float, float]]) -> float:
    """The score in [0, 1] of weights, which add up to 1, and scores: 1 less what every part takes away, so that full marks give exactly 1."""
    return min(1.0, max(0.0, 1 - math.fsum(weight * (1 - score) for weight, score in scores)))


def parts(name: str) -> dict[str, float]:
    """The verifiers of a weighted sum, or the one that `name` is, and their weights. Raises `ConfigError` as `check_name` does."""
    return _parts(name, "reward.verifier")


def modules(name: str) -> list[str]:
    """The modules of verifier `name`, or of all those of a weighted sum. Raises `ConfigError` as `check_name` does."""
    return [_import_path(part).split(":")[0] for part in _parts(name, "reward.verifier")]


def own(name: str) -> list[str]:
    """Those of verifier `name`, or of a weighted sum, that are the user's. Raises `ConfigError` as `check_name` does."""
    return [part for part in _parts(name, "reward.verifier") if part not in BUILT_IN]


def check_reference(name: str, reference: str) -> None:
    """Raise `ValueError` if one of the verifiers of `name` cannot judge by `reference`, as far as that takes no algebra: numbers and letters."""
    for part in _parts(name, "reward.verifier"):
        if part in _REFERENCES:
            _REFERENCES[part](reference)


def composed(verifier: str, parts: Mapping[str, float]) -> str:
    """The name of the verifier that gives `parts` (names and weights) their weights, and `verifier` the rest up to 1.

    A `verifier` that is a weighted sum already stays as it is. `parts` are those of a checked `RewardConfig`, which add up to less than 1.
    """
    if not parts or "*" in verifier:
        return verifier
    weights = {verifier: 1 - math.fsum(parts.values())}
    for part, weight in parts.items():
        weights[part] = weights.get(part, 0) + weight
    return "+".join(f"{weight!r}*{part}" for part, weight in weights.items())


def _parts(name: str, key: str) -> dict[str, float]:
    """The verifiers that `name` speaks of, and their weights."""
    for text, limit in (name, MAX_SUM), *((term.partition("*")[2] or term, MAX_NAME) for term in name.split("+")):
        if len(text) > limit:
            raise ConfigError(f"{key}={name[:60]!r}...: {text[:60]!r}... has {len(text)} characters, must have {limit} at most. Use shorter names")
    if "*" not in name:
        return {name: 1.0}
    parts: dict[str, float] = {}
    for term in name.split("+"):
        weight, _, part = term.partition("*")
        if not _WEIGHT.fullmatch(weight) or part in parts:
            raise ConfigError(f"{key}={name!r}: {term!r} is not a weight and a verifier that is named once. "
                              "Write a sum as '0.9*math_verify+0.1*format_tags'")
        parts[part] = float(weight)
    if not (all(weight > 0 for weight in parts.values()) and abs(math.fsum(parts.values()) - 1) < 1e-6):
        raise ConfigError(f"{key}={name!r}: the weights must be positive and add up to 1, not {math.fsum(parts.values())}")
    return parts


def _import_path(name: str, key: str = "reward.verifier") -> str:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if IMPORT_PATH.fullmatch(name):
        return current(name)
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    raise ConfigError(f"{key}={name!r}: no such verifier. Use one of {', '.join(sorted(BUILT_IN))}, or the import path "
                      f"'package.module:function' of your own" + (f"; did you mean {near[0]!r}?" if near else ""))


def _load(name: str) -> Verifier:
    path = _import_path(name)
    return import_function(path, "reward.verifier" if path == name else f"reward.verifier={name!r}, which is")


def asked_elsewhere(prompt: str, completion: str, reference: str) -> float:
    """Stands for the judge, which no reward process asks: it only waits (workers/reward/mixed.py)."""
    raise ValueError("the judge is asked by rollout workers. Ask by the workflow's reward")


def numeric(prompt: str, completion: str, reference: str) -> float:
    """1 if the first number on the first line of `completion` equals `reference`, else 0.

    Only the first line counts, so that a base model which goes on to write further examples is judged by its answer
    alone. Numbers may have a sign, thousands commas and decimals ("+1,234.50" equals "1234.5") but no exponent.
    Raises `ValueError` if `reference` is not such a number.
    """
    found, expected = first_number(completion), _reference_number(reference)
    return float(found == expected)


def numeric_distance(prompt: str, completion: str, reference: str) -> float:
    """1 / (1 + distance) of the first number on the first line from `reference`; 0 without a number.

    Partial credit for models that cannot be right by chance yet. Raises `ValueError` if `reference` is not a number.
    """
    found, expected = first_number(completion), _reference_number(reference)
    return 0.0 if found is None else float(1 / (1 + abs(found - expected)))


def first_number(completion: str) -> Decimal | None:
    """The first number on the first line of `completion`, exactly; None if there is none, or it has more than `MAX_DIGITS` digits."""
    found = _NUMBER.search(signed(completion.split("\n", 1)[0]))
    return None if found is None or len(found[0]) > MAX_DIGITS else _value(found[0])


def _reference_number(reference: str) -> Decimal:
    expected = _NUMBER.fullmatch(signed(reference).strip())
    if expected is None:
        raise ValueError(f"reference {reference!r} is not a number; numeric verifiers need one")
    return _value(expected[0])


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


_REFERENCES: dict[str, Callable[[str], object]] = {
    "numeric": _reference_number, "numeric_distance": _reference_number, "number": matching.reference_number,
    "multiple_choice": matching.reference_letter}

r"""The `math_verify` verifier: mathematical equality of numbers, expressions, sets and intervals, by the math-verify library.

    reference  --in plain LaTeX--> parse (cached) ----------------------+
    completion --its last answer, in plain LaTeX--> parse --> verify(gold, answer) --> 1 or 0
                                                    `-------- in a copy of a process, unless sure to end

There is no bound on how long SymPy takes. What is too long or too deep is wrong without a look; the same text is right, and numbers
are compared exactly; what else is of digits and signs alone is compared here; the rest in a copy of a process that has a few
seconds (bounded.py). The library's own time limits are off: they rely on SIGALRM, which C code does not notice.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Eq, Expr, Float, Number, Rational, UnevaluatedExpr, simplify, solve

from workers.reward.verifiers import bounded
from workers.reward.verifiers.formats import boxed, final_answer
from workers.reward.verifiers.matching import parse_number
from workers.reward.verifiers.notation import (
    FUNCTIONS,
    MAX_CHARS,
    formula,
    harmless,
    harmless_prose,
    has_variables,
    measures,
    too_large,
    wording,
    written,
)

TAIL_CHARS = 400
FLOAT_TOLERANCE = 1e-3
SHORT_WORDS = frozenset({"yes", "no", "odd", "all"})
WARM_UP = (("3", "4"), (r"\frac{1}{2}", "0.25"), (r"x^2 + \sqrt{2}", "2x(y - 1)"), (r"(-\infty, 3]", "[1, 2)"), (r"\{1, 2\}", "(1, 2)"),
           ("x = 3", "y = 4"), (r"\frac{\pi}{4}", r"2^{10}\sin(x)"), (r"\text{yes}", r"1 \text{ or } 2"))

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off


_BOX = r"\boxed{"
_AS_IT_IS = [LatexExtractionConfig(), ExprExtractionConfig()]
_WITHOUT_UNITS = [LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True)), ExprExtractionConfig()]
_BASE = re.compile(r"\d_\{?(\d+)\}?$")
_HOLLOW = re.compile(r"(?i)(?:indeed|therefore|thus|also|now)?\s*(?:correct|right|verified|confirmed|consistent|valid|reasonable|as follows)\b"
                     r"\s*(?:[.!,:;]|\n|$)")
"""What says of an answer that it is right, and not what it is."""
_SIGN_IN_WORDS = re.compile(r"(?i)(?:minus|negative|not)\b")
"""An answer "minus 5" must not be taken for 5."""


def score(prompt: str, completion: str, reference: str) -> float:
    r"""1 if the last answer in `completion` equals `reference` (a number, or LaTeX with or without $...$ or \boxed{}), else 0.

    The answer is the one that the completion marks (`formats.final_answer`: tags, a box, "answer is"), or else the last expression
    in it. Raises `ValueError` if no expression can be read from `reference`.
    """
    gold, expected = _gold(reference)
    marked = final_answer(completion, None if wording(expected) else _HOLLOW)
    text = _tail(completion) if marked is None else written(marked)
    if not text or too_large(text) or (marked is not None and _SIGN_IN_WORDS.match(text)):
        return 0.0
    if marked is not None and measures(text) > 1 and parse_number(expected) is not None:
        return 0.0  # of which the library takes the first
    if marked is not None and (decided := _at_once(expected, text)) is not None:
        return decided
    whole = marked is not None and formula(text)
    candidate = _framed(text) if whole else text if marked is None else f"answer: {text}"
    if harmless(expected) and (harmless(text) if whole else harmless_prose(text)):
        return _equal(gold, candidate)
    return bounded.bounded(judge, reference, candidate) or 0.0


def judge(reference: str) -> Callable[[str], float]:
    """What says, of an answer as the library reads it, whether it equals `reference`: 1 or 0."""
    gold, _ = _gold(reference)
    return functools.partial(_equal, gold)


def check_node() -> None:
    """Have everything ready before the first answer is judged. Raises `RuntimeError` where that fails."""
    bounded.start(judge)


def check_reference(reference: str) -> None:
    """Raise `ValueError` unless an expression can be read from `reference`."""
    _gold(reference)


@functools.lru_cache(maxsize=4096)
def _gold(reference: str) -> tuple[list[Any], str]:
    box = boxed(reference)
    text = written(reference if box is None else box)
    if too_large(text):
        raise ValueError(f"reference {reference!r:.200} is too long, too deep or has too long numbers: give at most {MAX_CHARS} characters")
    gold = _parse(_framed(text)) if text else []
    if not gold or (isinstance(gold[0], str) and wording(text) is None):
        raise ValueError(f"reference {reference!r:.200} holds no mathematical expression; write it as a number or as LaTeX")
    return gold, text


def _framed(text: str) -> str:
    """A formula such that the library takes it as a whole; it knows a percent sign only behind one."""
    return f"${text[:-2]}$\\%" if text.endswith(r"\%") else f"{_BOX}{text}}}"


def _parse(text: str) -> list[Any]:
    """As the library reads it. It takes letters at the end for units ("2r + s"), which it must not where they are variables."""
    whole = text.startswith(_BOX) and has_variables(text[len(_BOX):-1])
    return parse(text, _WITHOUT_UNITS if whole else _AS_IT_IS, parsing_timeout=None)


def _tail(completion: str) -> str:
    """The last lines of `completion`, of `TAIL_CHARS` characters at most; half a line where the last one is longer."""
    end = completion.rstrip()
    tail = end[-TAIL_CHARS:]
    return written(tail.split("\n", 1)[1] if len(tail) < len(end) and "\n" in tail else tail)


def _at_once(expected: str, text: str) -> float | None:
    """What needs no algebra: the same text, words, integers, and numbers that are equal. None for the rest."""
    if text and _compact(text) == _compact(expected):
        return 1.0
    base, expected_base = _BASE.search(text), _BASE.search(expected)
    if base and expected_base and base[1] != expected_base[1]:
        return 0.0  # which the library does not look at
    words, expected_words = wording(text), wording(expected)
    if expected_words is not None and not FUNCTIONS.intersection(expected_words.split()):
        if len(expected_words) > 3:
            return float(words == expected_words)
        # Shorter ones may be products of variables, unless they are said to be words.
        if words == expected_words and (expected_words in SHORT_WORDS or expected.startswith(r"\text")):
            return 1.0
    number, expected_number = parse_number(text), parse_number(expected)
    if number is None or expected_number is None:
        return None
    if number == expected_number:
        return 1.0
    exact = number.denominator == expected_number.denominator == 1 and "%" not in text + expected
    return 0.0 if exact else None


def _compact(text: str) -> str:
    return re.sub(r"\s+|\\left(?![A-Za-z])|\\right(?![A-Za-z])", "", text)


def _equal(gold: list[Any], candidate: str) -> float:
    answer = _parse(candidate)
    return float(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None) and not _misjudged(gold[0], answer[0]))


def _misjudged(gold: Any, answer: Any) -> bool:
    """Whether the library takes for equal what is not."""
    if isinstance(gold, Eq) and isinstance(answer, Eq) and all(isinstance(side, Expr) for side in (*gold.args, *answer.args)):
        if gold == answer or solve(gold, gold.free_symbols):
            return False
        ratio = simplify((gold.lhs - gold.rhs) / (answer.lhs - answer.rhs))  # it compares solutions: where there are none, all are alike
        return not (ratio.is_number and ratio.is_nonzero)
    if isinstance(gold, Number) and isinstance(answer, Number) and (isinstance(gold, Float) or isinstance(answer, Float)):
        return bool(abs(gold - answer) > FLOAT_TOLERANCE * abs(gold))  # it rounds to six places: small numbers are all alike to it
    if isinstance(gold, Expr) and isinstance(answer, Expr) and not (gold.has(UnevaluatedExpr) or answer.has(UnevaluatedExpr)):  # of percent
        gold, answer = gold.doit(), answer.doit()
        return isinstance(gold, Rational) and isinstance(answer, Rational) and gold != answer  # 2^-100 and 2^-101
    return False


def _warm_up() -> None:
    """Make the parser and SymPy fill their tables now, in the time that a process has for loading, and once for all copies."""
    for gold, answer in WARM_UP:
        _equal(_gold(gold)[0], _framed(answer))


_warm_up()

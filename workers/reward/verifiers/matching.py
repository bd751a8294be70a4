r"""Matchers that need no algebra: exact text, numbers, choices.

All are functions `(prompt, completion, reference) -> 1.0 or 0.0`. Numbers are exact rationals: integers are never compared with a
tolerance, for in floating point one of nine digits passes for its neighbour.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from workers.reward.verifiers.formats import boxed, final_answer, statements, tagged
from workers.reward.verifiers.notation import signed

TOLERANCE = Fraction(1, 10**6)
MAX_DIGITS = 400
_PLAIN = r"(?:[0-9]{1,3}(?:(?:,|\{,\}|\\[,!])[0-9]{3}){1,99}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?<![\w.])(?:(?<![)\]}}])[-+])?(?:\\?[$€£¥]\s?)?(?P<whole>{_PLAIN})"
                     r"(?:[eE](?P<exponent>[-+]?[0-9]{1,3})(?![0-9])|/(?P<denominator>[0-9]+)(?![0-9]|\.[0-9]))?(?P<percent>\s?\\?%)?")
_CHOICE = re.compile(r"\W*(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\W+)?(?:is\W+)?(?:([A-Z])(?![\w'’])|([a-z])(?=\W*$|[)]))")
_LISTED = re.compile(r"(?<!\w)(?:[A-Z](?![\w'’])|[a-z](?=[)]))")
_LAST_LINE_CHOICE = re.compile(r"\W*(?:([A-Za-z])\W*|([A-Z])[).:]\s.*|([a-z])[)]\s.*)")


def exact(prompt: str, completion: str, reference: str) -> float:
    r"""1 if the answer is `reference`, character by character but for runs of white space; else 0.

    The answer is what the completion marks as one (`formats.final_answer`: tags, a box, "answer is", of which sentence and line are compared),
    or else all of it.
    """
    return float(words(reference) in map(words, marked_answers(completion)))


def exact_nocase(prompt: str, completion: str, reference: str) -> float:
    """As `exact`, upper and lower case alike."""
    return float(words(reference).casefold() in (words(answer).casefold() for answer in marked_answers(completion)))


def number(prompt: str, completion: str, reference: str) -> float:
    """1 if the last number of the completion is `reference`; else 0.

    Numbers may have a sign, a currency, thousands commas (also LaTeX's), decimals, an exponent, a denominator or a percent sign: "$1,234.50",
    "1{,}234", "-1.5e3", "3/4", "50%" (which is 1/2). Where `reference` is an integer the number must be that integer; otherwise it may be off
    by `TOLERANCE` relative to `reference`, but by no more than `TOLERANCE`. Raises `ValueError` if `reference` is not a number.
    """
    found, expected = last_number(completion), reference_number(reference)
    if found is None:
        return 0.0
    if expected.denominator == 1:
        return float(found == expected)
    return float(abs(found - expected) <= TOLERANCE * min(abs(expected), Fraction(1)))


def multiple_choice(prompt: str, completion: str, reference: str) -> float:
    """1 if the completion chooses the letter `reference`; else 0. One that names several letters in its answer chooses none.

    The choice is the letter that the marked answer begins with ("B", "(B) Paris", "option B"), or else the letter on the last
    line, where that is all there is or where ")", "." or ":" follows. Raises `ValueError` if `reference` is not one letter.
    """
    return float(chosen_letter(completion) == reference_letter(reference))


def reference_number(reference: str) -> Fraction:
    """What `number` compares with. Raises `ValueError` if `reference` is not a number."""
    expected = parse_number(reference)
    if expected is None:
        raise ValueError(f"reference {reference!r:.200} is not a number; the number verifier needs one, such as 18, -1,234.5, 3/4 or 50%")
    return expected


def reference_letter(reference: str) -> str:
    """What `multiple_choice` compares with. Raises `ValueError` if `reference` is not one letter."""
    expected = reference.strip().strip("().").upper()
    if not re.fullmatch("[A-Z]", expected):
        raise ValueError(f"reference {reference!r:.200} is not a choice; the multiple_choice verifier needs one letter, such as B")
    return expected


def chosen_letter(completion: str) -> str:
    """The letter that `multiple_choice` takes for the choice, in upper case; '' without one."""
    marked = final_answer(completion)
    if marked is None:
        lines = completion.strip().splitlines()
        found = _LAST_LINE_CHOICE.fullmatch(lines[-1]) if lines else None
        return (found[1] or found[2] or found[3]).upper() if found else ""
    marked = re.sub(r"\\[a-zA-Z]+", " ", marked)
    found = _CHOICE.match(marked)
    chosen = (found[1] or found[2]).upper() if found else ""
    listed = set(_LISTED.findall(marked[found.end():])) - {"A", "I"} if found else set()  # which are words too
    return "" if {other.upper() for other in listed} - {chosen} else chosen


def last_number(text: str) -> Fraction | None:
    """The last number in `text`, exactly; None if there is none, or if it has more than `MAX_DIGITS` digits."""
    last = deque(_NUMBER.finditer(signed(text)), maxlen=1)
    return _value(last.pop()) if last else None


def parse_number(text: str) -> Fraction | None:
    """`text` as a number, exactly; None if it is not one and nothing else."""
    found = _NUMBER.fullmatch(signed(text).strip())
    return None if found is None else _value(found)


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > MAX_DIGITS:
        return None  # Python refuses to read such integers, and comparing them takes long
    value = Fraction(re.sub(r"[^0-9.]", "", found["whole"]))
    if found["exponent"]:
        value *= Fraction(10) ** int(found["exponent"])
    if found["denominator"]:
        denominator = int(found["denominator"])
        if denominator == 0:
            return None
        value /= denominator
    if found["percent"]:
        value /= 100
    return -value if found[0].startswith("-") else value


def marked_answer(completion: str) -> str:
    """The marked answer, or else all of the completion."""
    marked = final_answer(completion)
    return completion if marked is None else marked


def marked_answers(completion: str) -> list[str]:
    """The answers that `exact` compares: the marked one, as far as its sentence or its line goes, or else all of the completion."""
    if tagged(completion) is None and boxed(completion) is None:
        return statements(completion) or [completion]
    return [marked_answer(completion)]


def words(text: str) -> str:
    """`text` with one space for every run of white space."""
    return " ".join(text.split())

"""The answer in a completion, as a text by which samples agree or not: for majority votes (maj@k).

    numeric, numeric_distance   the first number on the first line          number   the last number          exactly, as a fraction
    multiple_choice             the chosen letter
    exact, exact_nocase         the marked answer, or else all of it, white space made uniform
    math_verify                 the marked answer, or else the last line: a number exactly, or its LaTeX without white space
    any other                   the marked answer; '' without one

Marked: tags, a box, "answer is" (formats.py). No algebra: "2x + 2" and "2(x + 1)" are two answers. '' is no answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from hashlib import blake2b

from workers.reward.verifiers.formats import final_answer
from workers.reward.verifiers.matching import chosen_letter, last_number, marked_answer, parse_number, words
from workers.reward.verifiers.notation import written
from workers.reward.verifiers.registry import first_number

MAX_CHARS = 200
_LAYOUT = re.compile(r"\s+|\\[,;:! ]|\\left(?![A-Za-z])|\\right(?![A-Za-z])|[.$]+$|^\$+")


def extract(verifier: str, completion: str) -> str:
    """The answer that `verifier` (a name, or a weighted sum, whose first part counts) would judge in `completion`: at most `MAX_CHARS`
    characters, of a longer one its beginning and a digest; '' where there is none."""
    name = verifier.split("+", 1)[0].rpartition("*")[2]
    found = _EXTRACTORS.get(name, _marked)(completion)
    if len(found) <= MAX_CHARS:
        return found
    digest = blake2b(found.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{found[:MAX_CHARS - 17]} {digest}"


def _fraction(value: Fraction | None) -> str:
    return "" if value is None else str(value)


def _first(completion: str) -> str:
    found = first_number(completion)
    # Python writes no fraction of thousands of digits.
    if found is None or len(found.as_tuple().digits) > MAX_CHARS or (found and abs(found.adjusted()) > MAX_CHARS):
        return "" if found is None else str(found)
    return _fraction(Fraction(found))


def _marked(completion: str) -> str:
    return words(final_answer(completion) or "")


def _formula(completion: str) -> str:
    marked = final_answer(completion)
    lines = completion.strip().splitlines()
    text = written(marked if marked is not None else lines[-1] if lines else "")
    value = parse_number(text)
    return _LAYOUT.sub("", text) if value is None else _fraction(value)


_EXTRACTORS: dict[str, Callable[[str], str]] = {
    "numeric": _first,
    "numeric_distance": _first,
    "number": lambda completion: _fraction(last_number(completion)),
    "multiple_choice": chosen_letter,
    "exact": lambda completion: words(marked_answer(completion)),
    "exact_nocase": lambda completion: words(marked_answer(completion)).casefold(),
    "math_verify": _formula,
}

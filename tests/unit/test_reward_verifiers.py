"""Verifiers: what counts as a number, as an answer, as a name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import ConfigError
from workers.reward import verifiers
from workers.reward.verifiers import numeric


@pytest.mark.parametrize(("completion", "reference", "score"), [
    (" 57\n12 + 3 = 15", "57", 1.0),
    ("57", "57.0", 1.0),
    (" 58\n57", "57", 0.0),
    ("\n57", "57", 0.0),
    ("the answer is 1,234.5!", "1234.50", 1.0),
    ("1,23", "1", 1.0),
    ("1,2345", "1", 1.0),
    ("-5", "5", 0.0),
    ("+5.", "5", 1.0),
    (".5", "0.5", 1.0),
    ("12-34", "12", 1.0),
    ("x = -7", "-7", 1.0),
    ("570", "57", 0.0),
    ("57.5", "57", 0.0),
    ("٥٧", "57", 0.0),
    ("", "57", 0.0),
    ("none", "57", 0.0),
])
def test_numeric_cases(completion: str, reference: str, score: float) -> None:
    assert numeric("", completion, reference) == score


@settings(max_examples=60, deadline=None)
@given(st.integers(-10**12, 10**12), st.integers(-10**12, 10**12), st.text("abc =:\n", max_size=20))
def test_numeric_judges_the_first_number_only(value: int, other: int, rest: str) -> None:
    assert numeric("", f" {value}\n{other}{rest}", str(value)) == 1.0
    assert numeric("", f"= {value:,} or {other}", str(value)) == 1.0
    assert numeric("", f"{other}", str(value)) == float(other == value)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_numeric_never_fails_on_a_completion(completion: str) -> None:
    assert numeric("", completion, "1") in (0.0, 1.0)


def test_numeric_refuses_a_reference_that_is_no_number() -> None:
    with pytest.raises(ValueError, match="'many' is not a number"):
        numeric("", "1", "many")


def test_math_verify() -> None:
    score = verifiers.load("math_verify")
    assert score("", r"so the answer is $\frac{1}{2}$", "0.5") == 1.0
    assert score("", r"\boxed{x^2 + 2x + 1}", "$(x+1)^2$") == 1.0
    assert score("", "7", "8") == 0.0
    assert score("", "", "8") == 0.0


def test_reasoning_gym() -> None:
    from workers.reward.gym import encode_reference

    score = verifiers.load("reasoning_gym")
    reference = encode_reference("chain_sum", {"max_terms": 2}, {"question": "1 + 1 =", "answer": "2", "metadata": {}})
    assert score("", " 2\n", reference) == 1.0
    assert score("", "<answer>3</answer> no, <answer> 2 </answer>", reference) == 1.0
    assert score("", "3", reference) < 1.0
    assert json.loads(reference)["task"] == "chain_sum"


def test_names() -> None:
    assert verifiers.check_name("some.package:function") == "some.package:function"
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        verifiers.check_name("numerics")
    for name in ("", "a.b", "a:b:c", "../x:y", "a b:c"):
        with pytest.raises(ConfigError, match="math_verify, numeric, numeric_distance, reasoning_gym"):
            verifiers.check_name(name)
    with pytest.raises(ConfigError, match="has no function 'missing'"):
        verifiers.load("workers.reward.verifiers:missing")

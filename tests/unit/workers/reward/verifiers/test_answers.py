"""Answers by which samples agree: where two completions have the same one, their verifier gives them the same score."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.reward.verifiers.answers import MAX_CHARS, extract
from workers.reward.verifiers.registry import load

NUMBERS = st.sampled_from(["18", "18.0", "1,8", "-3", "$18", "50%", "1/2", "0.5", "1e3", "1000", "", "x"])
TEXTS = st.builds("{}{}{}".format, st.sampled_from(["", "so ", "The answer is ", "\\boxed{", "I think\n"]), NUMBERS,
                  st.sampled_from(["", "}", ".", "\nno"]))
CHOICES = st.builds("{}{}".format, st.sampled_from(["", "The answer is ", "Answer: ", "well\n"]),
                    st.sampled_from(["A", "(B)", "b.", "A or B", "C) it", "none"]))
REFERENCES = {"numeric": "18", "numeric_distance": "18", "number": "0.5", "exact": "18", "exact_nocase": "18", "multiple_choice": "B"}


@pytest.mark.parametrize("verifier", sorted(REFERENCES))
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_samples_that_agree_have_the_same_score(verifier: str, data: st.DataObject) -> None:
    judge, scores = load(verifier), dict[str, set[float]]()
    for text in data.draw(st.lists(CHOICES if verifier == "multiple_choice" else TEXTS, min_size=20, max_size=40)):
        scores.setdefault(extract(verifier, text), set()).add(judge("", text, REFERENCES[verifier]))
    assert {answer: found for answer, found in scores.items() if len(found) > 1} == {}


@pytest.mark.parametrize(("verifier", "completion", "answer"), [
    ("number", "first 3, then 1,000.50", "2001/2"), ("numeric", " 18\n19", "18"), ("numeric", "none", ""),
    ("math_verify", "so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"), ("math_verify", "The answer is $ x + 1 $.", "x+1"),
    ("math_verify", "is 0.50", "is0.50"), ("math_verify", "\\boxed{0.50}", "1/2"), ("math_verify", "", ""),
    ("multiple_choice", "The answer is (C).", "C"),
    ("0.9*number+0.1*boxed", "\\boxed{7}", "7"), ("code", "def f(): return 1", ""), ("my.module:judge", "<answer>yes  sir</answer>", "yes sir"),
    ("numeric", "0." + "0" * 5000 + "1", "1E-5001")], ids=lambda value: str(value)[:30])
def test_the_answer_of(verifier: str, completion: str, answer: str) -> None:
    assert extract(verifier, completion) == answer


@pytest.mark.parametrize(("verifier", "completion"), [("numeric", "9" * 5000), ("exact", "long " * 1000)])
def test_long_answers_are_short_and_differ(verifier: str, completion: str) -> None:
    first, second = extract(verifier, f"{completion}1"), extract(verifier, f"{completion}2")
    assert len(first) == len(second) == MAX_CHARS and first != second and first[:100] == second[:100]

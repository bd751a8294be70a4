"""What a judge is asked, and the score in what it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.endpoints.judge_server import completion
from workers.config.judge import FIELDS, JudgeConfig
from workers.reward.judges.question import TEMPLATE, CallError, digest, keep, rendered, request_body, score_of

JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@settings(deadline=None)
@given(st.text(), st.text(), st.text(), st.text())
def test_whatever_stands_in_the_texts_stays_as_it_is(prompt: str, answer: str, reference: str, rubric: str) -> None:
    config = JudgeConfig(rubric=rubric, template="{prompt}\0{completion}\0{reference}\0{rubric}\0{scale_min}..{scale_max} {\"score\": 1}")
    assert rendered(config, prompt, answer, reference) == "\0".join([prompt, answer, reference, rubric, '0..10 {"score": 1}'])


@settings(deadline=None)
@given(st.text(st.characters()), st.sampled_from([f"{{{name}}}" for name in FIELDS]))
def test_a_request_is_json_of_whatever_text(text: str, field: str) -> None:
    more = {"max_tokens": None, "max_completion_tokens": 9, "temperature": 1.0}
    assert {"model", "messages", "stream", "temperature", "max_completion_tokens"} == set(json.loads(request_body(JudgeConfig(body=more), "q")))
    body = json.loads(request_body(JudgeConfig(model="m", max_tokens=7), rendered(JudgeConfig(), text, text + field, "\ud800")))
    assert field in body["messages"][0]["content"] and (body["model"], body["max_tokens"], body["stream"]) == ("m", 7, False)


def test_the_built_in_template_asks_for_all() -> None:
    assert all(f"{{{name}}}" in TEMPLATE for name in FIELDS)
    JudgeConfig(template=TEMPLATE, rubric="r").check()
    assert score_of(JudgeConfig(), completion(TEMPLATE.replace("NUMBER", "4"))) == 0.4


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.floats(0, 1))
def test_the_scale_is_linear(least: float, width: float, share: float) -> None:
    config = JudgeConfig(scale_min=least, scale_max=least + width, pattern="(.+)")
    assume(config.scale_max > least)
    value = min(config.scale_max, least + share * width)
    assert score_of(config, completion(repr(value))) == pytest.approx((value - least) / (config.scale_max - least), abs=1e-6)
    assert score_of(config, completion(repr(config.scale_max))) == 1.0 and score_of(config, completion(repr(least))) == 0.0


@settings(deadline=None)
@given(JSON | st.dictionaries(st.just("choices"), st.lists(st.dictionaries(st.just("message"), JSON | st.dictionaries(st.just("content"), JSON)))))
def test_any_json_has_a_score_or_none(content: Any) -> None:
    try:
        assert 0 <= score_of(JudgeConfig(pattern="(.*)"), json.dumps(content).encode()) <= 1
    except CallError as error:
        assert error.again


@pytest.mark.parametrize("said", ["Score: 8", "**Score:** 8", "the score is 8", "Score (0-10): 8", "Final score: `8`", "score=8.0, not score: none"])
def test_scores_as_models_write_them(said: str) -> None:
    assert score_of(JudgeConfig(), completion(said)) == 0.8


def test_an_answer_that_was_cut_off_is_said_to_be() -> None:
    body = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    with pytest.raises(CallError, match=r"its answer is empty: it was cut off at reward\.judge\.max_tokens=7"):
        score_of(JudgeConfig(max_tokens=7), json.dumps(body).encode())


@given(st.binary(max_size=200))
def test_any_bytes_have_none(body: bytes) -> None:
    with pytest.raises(CallError):
        score_of(JudgeConfig(), body)


@pytest.mark.parametrize(("text", "score"), [
    ("Score: 7", 0.7), ("score = 7.5", 0.75), ("**Score:** 10", 1.0), ('{"score": 3}', 0.3), ("Score: 0", 0.0), ("Score: 2\nno, Score: 9", 0.9),
    ("Score:\n\n8/10", 0.8), ("SCORE 4 of 10", 0.4)])
def test_numbers_that_are_found(text: str, score: float) -> None:
    assert score_of(JudgeConfig(), completion(text)) == pytest.approx(score)


@pytest.mark.parametrize("text", ["7", "Score: seven", "Score: 11", "Score: -1", "Score: 7" + " " * 5000, "Scores were given", "Score: 1" + "0" * 99])
def test_numbers_that_are_not(text: str) -> None:
    with pytest.raises(CallError, match="finds no number from 0 to 10"):
        score_of(JudgeConfig(), completion(text))


@pytest.mark.parametrize("pattern", ["(nan)|(x)", "(x)?nan", "(inf)"])
def test_groups_without_a_number(pattern: str) -> None:
    with pytest.raises(CallError, match="finds no number"):
        score_of(JudgeConfig(pattern=pattern), completion("nan inf"))


@given(st.lists(st.text(), max_size=4), st.lists(st.text(), max_size=4))
def test_a_digest_is_of_these_texts_alone(one: list[str], other: list[str]) -> None:
    assert (digest(*one) == digest(*other)) is (one == other) and len(digest(*one)) == 16


@given(st.lists(st.integers(0, 8)), st.integers(0, 5))
def test_what_is_kept_is_bounded_and_the_latest(keys: list[int], size: int) -> None:
    scores: dict[bytes, float] = {}
    for key in keys:
        if bytes([key]) not in scores:
            keep(scores, bytes([key]), key / 8, size)
        assert len(scores) <= size and (not size or scores[bytes([key])] == key / 8)

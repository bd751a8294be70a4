"""Verifiers: what counts as a number, as an answer, as a name."""

import importlib
import json
from pathlib import Path

import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import ConfigError
from workers.reward.verifiers import bounded, gym, registry
from workers.reward.verifiers.gym import encode_reference
from workers.reward.verifiers.registry import numeric
from workers.run.moved import MOVED


@pytest.mark.parametrize(("completion", "reference", "score"), [
    (" 57\n12 + 3 = 15", "57", 1.0),
    ("57", "57.0", 1.0),
    (" 58\n57", "57", 0.0),
    ("\n57", "57", 0.0),
    ("the answer is 1,234.5!", "1234.50", 1.0),
    ("1,23", "1", 1.0),
    ("1,2345", "1", 1.0),
    ("-5", "5", 0.0),
    ("−5", "-5", 1.0),
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


def test_reasoning_gym() -> None:
    score = registry.load("reasoning_gym")
    reference = encode_reference("chain_sum", {"max_terms": 2}, {"question": "1 + 1 =", "answer": "2", "metadata": {}})
    assert score("", " 2\n", reference) == 1.0
    assert score("", "<answer>3</answer> no, <answer> 2 </answer>", reference) == 1.0
    assert score("", "3", reference) < 1.0
    assert json.loads(reference)["task"] == "chain_sum"


def question(task: str, index: int = 0) -> tuple[str, str]:
    """A question of a task of reasoning_gym: its answer, and its reference."""
    entry = reasoning_gym.create_dataset(task, seed=1, size=index + 1)[index]
    return str(entry["answer"]), encode_reference(task, {}, entry)


@pytest.mark.parametrize("task", sorted(gym.EVALUATED_TASKS | gym.SYMBOLIC_TASKS))
def test_tasks_that_evaluate_answers(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own answers get full marks, and what would run code or take for ever gets none, without being run."""
    monkeypatch.setattr(bounded, "CPU_S", 60)
    monkeypatch.setattr(bounded, "WALL_S", 300.0)
    answer, reference = question(task)
    assert gym.score("", answer, reference) == 1.0
    assert gym.score("", f"({answer}) * 2", reference) < 1.0
    monkeypatch.setattr(bounded, "CPU_S", 1)
    touched = tmp_path / "touched"
    for attack in (f"__import__('pathlib').Path({str(touched)!r}).touch()", f"[open({str(touched)!r}, 'w')]", "(().__class__)",
                   "exec(chr(49))", "print(1)", "9**9**9**9", "(lambda: 1)()", "x.y", "[0 for i in range(10)]"):
        assert gym.score("", attack, reference) < 0.1
        assert not touched.exists()


def test_a_task_that_cannot_read_an_answer() -> None:
    """It is the answer that is wrong; where the question itself is broken, that is said."""
    answer, reference = question("prime_factorization")
    assert gym.score("", answer, reference) == 1.0
    assert gym.score("", "many", reference) == 0.0
    broken = json.loads(reference)
    broken["entry"]["answer"] = "some"
    with pytest.raises(ValueError, match="some"):
        gym.score("", "many", json.dumps(broken))


def test_names() -> None:
    registry.check_name("some.package:function")
    with pytest.raises(ConfigError, match="did you mean 'numeric'"):
        registry.check_name("numerics")
    for name in ("", "a.b", "a:b:c", "../x:y", "a b:c"):
        with pytest.raises(ConfigError, match="boxed, .*exact, .*math_verify, .*numeric, .*reasoning_gym"):
            registry.check_name(name)
    with pytest.raises(ConfigError, match="has no function 'missing'"):
        registry.load("workers.reward.verifiers.registry:missing")


@pytest.mark.parametrize("name", sorted(name for name in registry.BUILT_IN if not name.startswith("code")))
def test_every_built_in_name_is_a_function(name: str) -> None:
    assert callable(registry.load(name))


@pytest.mark.parametrize(("name", "message"), [
    ("0.5*numeric", "must be positive and add up to 1, not 0.5"),
    ("0.5*numeric+0.5*numeric", "'0.5\\*numeric' is not a weight and a verifier that is named once"),
    ("0.0*numeric+1.0*boxed", "must be positive"),
    ("-1*numeric+2*boxed", "is not a weight"),
    ("numeric+0.5*boxed", "'numeric' is not a weight"),
    ("nan*boxed+inf*numeric", "is not a weight"),
    ("0.5*numerics+0.5*boxed", "'numerics': no such verifier"),
    ("*", "is not a weight"),
    (f"{'a' * 200}:b", "has 202 characters, must have 200 at most. Use shorter names"),
    ("+".join(f"0.04*{'a' * 170}.m{number}:b" for number in range(25)), "has [0-9]+ characters, must have 4096 at most"),
])
def test_sums_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.check_name(name, "key")
    with pytest.raises(ConfigError):
        registry.load(name)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["boxed", "exact", "exact_nocase", "my.own:function"]), st.floats(1e-6, 0.24)))
def test_the_name_of_a_sum_says_all_of_it(parts: dict[str, float]) -> None:
    name = registry.composed("number", parts)
    registry.check_name(name)
    assert registry.composed(name, {"format_tags": 0.5}) == name or not parts
    assert name == "number" or set(name.replace("*", "+").split("+")) >= {"number", *parts}


def test_a_weighted_sum() -> None:
    assert registry.composed("number", {}) == "number"
    score = registry.load(registry.composed("number", {"boxed": 0.125, "exact": 0.25}))
    assert score("", r"\boxed{5}", "5") == 1.0
    assert score("", "5", "5") == 0.875
    assert score("", "so 5", "5") == 0.625
    assert score("", r"\boxed{6}", "5") == 0.125
    assert score("", "", "5") == 0.0


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 0.3), min_size=3, max_size=3))
def test_full_marks_and_none_are_exact(weights: list[float]) -> None:
    parts = dict(zip(("boxed", "exact", "exact_nocase"), weights, strict=True))
    score = registry.load(registry.composed("number", parts))
    assert score("", r"\boxed{5}", "5") == 1.0
    assert 0.0 <= score("", "", "5") <= 1e-9


@pytest.mark.parametrize(("old", "function"), [
    ("workers.reward.verifiers:numeric", registry.numeric), ("workers.reward.matching:number", registry.load("number")),
    ("workers.reward.mathematics:score", registry.load("math_verify")), ("workers.reward.code:score", registry.load("code"))])
def test_paths_of_modules_that_have_moved_still_work_and_say_so(old: str, function: registry.Verifier) -> None:
    with pytest.warns(FutureWarning, match=f"{old} is now workers.reward"):
        assert registry.load(old) is function


def test_every_moved_module_is_where_the_table_says() -> None:
    for old, now in MOVED.items():
        assert importlib.import_module(now) and old != now

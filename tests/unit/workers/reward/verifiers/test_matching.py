"""Matchers: numbers exactly, text, choices."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.reward.verifiers.matching import exact, exact_nocase, last_number, multiple_choice, number, parse_number

INTEGERS = st.integers(-10**30, 10**30)


@pytest.mark.parametrize(("text", "value"), [
    ("18", 18), ("-18.", -18), ("−7", -7), ("it is –7", -7), ("3–5", 5), ("pages 3 –5", 5), ("10%–20%", Fraction(1, 5)), ("$3$–$5$", 5),
    ("+.5", Fraction(1, 2)), ("$1,234.50", Fraction("1234.5")), ("-$5", -5), ("$-5", -5), ("-1.5e3", -1500),
    ("it is 3/4.", Fraction(3, 4)), ("3/4.5", Fraction(45, 10)),
    ("3/4", Fraction(3, 4)), ("50%", Fraction(1, 2)), (r"1.5\%", Fraction(15, 1000)), ("5-3", 3), ("10 - 3 = 7", 7), ("x=-3", -3), ("(-3)", -3),
    ("3kg", 3), ("H2O", None), ("1,23", 23), ("1,2345", 2345), ("5/0", None), ("1 or 2", 2), ("", None), ("none", None), ("9" * 500, None),
    ("٥٧", None), (r"\boxed{1{,}234}", 1234), (r"1\,234,567.5", Fraction("1234567.5")), (r"1\!234", 1234), (r"-\$5", -5), (r"3\,4", 4),
    ("1{,}23", 23),
])
def test_last_number(text: str, value: Fraction | int | None) -> None:
    assert last_number(text) == value


@settings(deadline=None)
@given(INTEGERS, INTEGERS, st.text(alphabet="ab :=,.\n", max_size=10))
def test_integers_are_equal_exactly(value: int, other: int, words: str) -> None:
    for completion in (f"{other} {words} {value}", f"= {value:,}", f"{value}.0", f"**{value}**", f"{value} apples."):
        assert number("", completion, str(value)) == 1.0
        assert number("", completion, f"{value:,}") == 1.0
        assert number("", completion, str(value + 1)) == number("", completion, str(value - 1)) == 0.0
        assert number("", completion, str(other)) == float(value == other)
    assert number("", f"{value}.0000001", str(value)) == 0.0


@settings(deadline=None)
@given(st.decimals(Decimal("-1e9"), Decimal("1e9"), allow_nan=False, places=6), st.decimals(-1000, 1000, allow_nan=False, places=9))
def test_other_numbers_may_be_off_by_a_millionth(value: Decimal, error: Decimal) -> None:
    expected, found = Fraction(value), Fraction(value) + Fraction(error)
    text = format(value + error, "f")  # at most 19 digits: exact
    right = found == expected if expected.denominator == 1 else abs(found - expected) * 10**6 <= min(abs(expected), Fraction(1))
    assert number("", text, format(value, "f")) == float(right)


@pytest.mark.parametrize(("completion", "reference", "score"), [
    ("0.333333", "1/3", 1.0), ("0.33333", "1/3", 0.0), ("50%", "0.5", 1.0), ("123456788", "123456789", 0.0), ("123456789.4", "123456789", 0.0),
    ("3.14159", "3.141592653589793", 0.0), ("3.1415927", "3.141592653589793", 1.0), ("0.0000002", "0.0000001", 0.0), ("", "5", 0.0), ("1e3",
    "1000", 1.0),
])
def test_number_cases(completion: str, reference: str, score: float) -> None:
    assert number("", completion, reference) == score


@pytest.mark.parametrize("reference", ["many", "", "1 2", "5/0", "1e", "9" * 500])
def test_number_refuses_a_reference_that_is_none(reference: str) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        number("", "1", reference)


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert number("", text, "1") in (0.0, 1.0)
    assert exact("", text, "1") in (0.0, 1.0)
    assert multiple_choice("", text, "B") in (0.0, 1.0)
    parse_number(text)


@pytest.mark.parametrize("piece", ["1", "1,", "111,", "1.", "1/", "-", "$", "1e", " ", "A ", ".,"])
def test_long_texts_take_linear_time(piece: str) -> None:
    """With anything quadratic this would take hours."""
    text = piece * (300_000 // len(piece))
    for completion in (text, f"answer is {text}"):
        number("", completion, "1")
        exact_nocase("", completion, "1")
        multiple_choice("", completion, "B")


@pytest.mark.parametrize(("completion", "reference", "score", "nocase"), [
    (" New\n York ", "New York", 1.0, 1.0), ("new york", "New York", 0.0, 1.0), ("NewYork", "New York", 0.0, 0.0), ("<answer>Bern</answer> x",
    "Bern", 1.0, 1.0),
    (r"\boxed{Bern}", "Bern", 1.0, 1.0), ("The answer is Bern.", "Bern", 1.0, 1.0), ("It is Bern", "Bern", 0.0, 0.0), ("STRASSE",
    "Straße", 0.0, 1.0), ("", "a", 0.0, 0.0),
    ("The answer is St. Louis.", "St. Louis", 1.0, 1.0), ("The answer is the U.S.", "the u.s.", 0.0, 1.0),
    ("Answer: **J. K. Rowling**.\nx", "J. K. Rowling", 1.0, 1.0),
    ("The answer is St. Louis\n<answer>St</answer>", "St. Louis", 0.0, 0.0),
    ("The answer is Bern. Not Paris.", "Paris", 0.0, 0.0), ("<answer>a. b</answer>", "a", 0.0, 0.0), ("The answer is a. b", "b", 0.0, 0.0),
])
def test_exact(completion: str, reference: str, score: float, nocase: float) -> None:
    assert exact("", completion, reference) == score
    assert exact_nocase("", completion, reference) == nocase


@pytest.mark.parametrize(("completion", "score"), [
    ("B", 1.0), ("b", 1.0), ("(B)", 1.0), ("**B**", 1.0), ("B. Paris", 1.0), ("B) Paris", 1.0), ("so:\nB: Paris", 1.0), ("The answer is B.", 1.0),
    ("The answer is (b) Paris", 1.0), ("The answer is b) Paris", 1.0), ("b) Paris", 1.0), ("a) One", 0.0), ("The answer is be) it", 0.0),
    ("The answer is (b) or (a)", 0.0),
    ("The answer is (B) Paris, because A is too small", 1.0), (r"\boxed{B}", 1.0), (r"\boxed{\text{(B)}}", 1.0), ("Answer: option B", 1.0),
    ("<answer>b</answer>", 1.0),
    ("A", 0.0), ("The answer is A. B is wrong", 0.0), ("A\nB\nC", 0.0), (r"\boxed{B, C}", 0.0), (r"\boxed{A, B}", 0.0),
    ("The answer is C or B", 0.0), ("Because", 0.0),
    ("#### Analysis of each option\nC is wrong\n\nB", 1.0), ("#### Option C\nwrong\n\n**B**", 1.0), ("so\n#### B", 1.0),
    ("The answer is Because", 0.0), ("Paris", 0.0), ("", 0.0), ("A B", 0.0),
])
def test_multiple_choice(completion: str, score: float) -> None:
    assert multiple_choice("", completion, "B") == multiple_choice("", completion, " (b) ") == score


def test_multiple_choice_refuses_a_reference_that_is_none() -> None:
    for reference in ("", "AB", "5", "Paris"):
        with pytest.raises(ValueError, match="is not a choice"):
            multiple_choice("", "A", reference)

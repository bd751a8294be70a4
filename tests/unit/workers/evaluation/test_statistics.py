"""avg@k, pass@k, maj@k and their intervals against counting all subsets, all draws, and the equation that Wilson's interval solves."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from workers.evaluation.statistics import Judged, avg_at_k, estimate, figures, maj_at_k, pass_at_k

OUTCOMES = st.lists(st.booleans(), min_size=1, max_size=9)
VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=40)
VOTES = st.lists(st.tuples(st.sampled_from(["", "1", "2", "x"]), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=12)


@given(OUTCOMES, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    subsets = [any(subset) for subset in combinations(right, k)]
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(float(Fraction(sum(subsets), len(subsets))), abs=1e-12)


@given(OUTCOMES)
def test_pass_at_1_is_the_average_and_pass_at_all_is_whether_any_is_right(right: list[bool]) -> None:
    assert pass_at_k(len(right), sum(right), 1) == pytest.approx(avg_at_k([float(one) for one in right]))
    assert pass_at_k(len(right), sum(right), len(right)) == float(any(right))


def test_pass_at_k_is_exact_where_binomials_are_too_large_for_floats() -> None:
    assert pass_at_k(100_000, 50, 1000) == pytest.approx(1 - float(np.exp(np.sum(np.log1p(-1000 / np.arange(100_000 - 49, 100_001))))), rel=1e-9)


@pytest.mark.parametrize("k", [0, 4])
def test_pass_at_k_of_fewer_samples_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match="k must be from 1"):
        pass_at_k(3, 1, k)


@given(VOTES)
def test_maj_is_the_expected_score_of_a_voter_for_an_answer_drawn_among_those_with_most_votes(votes: list[tuple[str, float]]) -> None:
    counts = Counter(answer for answer, _ in votes if answer)
    found = maj_at_k(Judged([score for _, score in votes], [answer for answer, _ in votes]))
    if not counts:
        assert found is None
        return
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    draws = [score for winner in winners for answer, score in votes if answer == winner]  # each winner has equally many voters
    assert found == pytest.approx(sum(draws) / len(draws))


@given(VOTES, st.randoms(use_true_random=False))
def test_maj_does_not_depend_on_the_order_of_samples(votes: list[tuple[str, float]], random: object) -> None:
    shuffled = list(votes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    one, other = (maj_at_k(Judged([score for _, score in some], [answer for answer, _ in some])) for some in (votes, shuffled))
    assert one == (None if other is None else pytest.approx(other))


@given(OUTCOMES, st.sampled_from([0.8, 0.95, 0.99]))
def test_of_yes_and_no_the_interval_is_wilsons(right: list[bool], confidence: float) -> None:
    found, number = estimate([float(one) for one in right], confidence), len(right)
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    for end in (found.low, found.high):  # Wilson's ends solve (m - p)^2 = z^2 p (1 - p) / n
        assert (found.mean - end) ** 2 == pytest.approx(z * z * end * (1 - end) / number, abs=1e-9)
    assert found.low < found.high


@given(VALUES, st.integers(1, 64))
def test_an_interval_holds_the_mean_and_stays_in_bounds(values: list[float], num_samples: int) -> None:
    found = estimate(values, 0.95, num_samples)
    assert 0 <= found.low <= found.mean <= found.high <= 1 and found.low < found.high
    assert found.mean == pytest.approx(float(np.mean(values)), abs=1e-12)


@given(VALUES, st.integers(1, 16))
def test_more_confidence_or_fewer_samples_never_make_it_narrower(values: list[float], num_samples: int) -> None:
    assume(len(set(values)) > 1)

    def width(confidence: float, number: int) -> float:
        found = estimate(values, confidence, number)
        return found.high - found.low

    assert width(0.99, num_samples) >= width(0.9, num_samples) - 1e-12
    assert width(0.9, 1) >= width(0.9, num_samples) - 1e-12


@pytest.mark.parametrize(("spread", "num_samples"), [(0.5, 1), (0.5, 8), (4.0, 8), (50.0, 4)])
def test_the_interval_holds_the_truth_about_as_often_as_it_says(spread: float, num_samples: int) -> None:
    """Prompts of beta-distributed difficulty: from all right or all wrong (a small `spread`) to all alike."""
    draws, truth, held = np.random.default_rng(7), 0.7, 0
    for _ in range(1500):
        easy = draws.beta(truth * spread, (1 - truth) * spread, size=60)
        found = estimate((draws.binomial(num_samples, easy) / num_samples).tolist(), 0.95, num_samples)
        held += found.low <= truth <= found.high
    assert 0.92 <= held / 1500 <= 0.98


def test_figures_are_means_over_prompts() -> None:
    judged = [Judged([1.0, 0.0, 1.0, 1.0], ["3", "4", "3", "3"]), Judged([0.0, 0.0, 0.5, 0.0], ["1", "1", "", "2"]), Judged([0.0] * 4, [""] * 4)]
    told = figures(judged, [1, 2, 4], 0.95)
    assert told["num_samples"] == 4 and told["avg"]["mean"] == pytest.approx((0.75 + 0.125) / 3)
    assert [told["pass"][k]["mean"] for k in ("1", "2", "4")] == pytest.approx([0.25, 1 / 3, 1 / 3]), "half marks are not right"
    assert told["maj"]["mean"] == pytest.approx(1 / 3), "a prompt without any answer counts 0"


def test_without_any_answer_there_is_no_majority() -> None:
    assert figures([Judged([1.0], [""]), Judged([0.0])], [1], 0.95)["maj"] is None


def test_no_prompts_have_no_figures() -> None:
    with pytest.raises(ValueError, match="at least one must have been judged"):
        figures([], [1], 0.95)

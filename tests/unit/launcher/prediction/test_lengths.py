"""Means and longest of answers, against drawing them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from launcher.prediction.lengths import Lengths


@pytest.mark.parametrize(("mean", "sigma", "most"), [(60.0, 0.8, 1000), (200.0, 0.8, 400), (500.0, 0.3, 600), (5000.0, 1.2, 20000)])
@pytest.mark.parametrize("number", [1, 4, 16])
def test_the_longest_of_so_many(mean: float, sigma: float, most: int, number: int) -> None:
    lengths = Lengths(mean, sigma, most)
    drawn = np.minimum(np.random.default_rng(0).lognormal(lengths._middle(), sigma, (20000, number)), most)
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert lengths.longest(number) == pytest.approx(drawn.max(axis=1).mean(), rel=0.03)


def test_answers_that_are_always_cut_off_are_as_long_as_may_be() -> None:
    assert Lengths(4.0, 0.8, 4).longest(16) == pytest.approx(4.0, rel=0.01)
    assert Lengths(50.0, 0.0, 100).longest(16) == 50.0


def test_more_answers_have_a_longer_longest_and_one_is_as_long_as_the_mean() -> None:
    lengths = Lengths(100.0, 0.8, 4096)
    found = [lengths.longest(number) for number in (1, 2, 8, 64)]
    assert found == sorted(found) and found[0] == pytest.approx(100, rel=0.02) and math.isfinite(found[-1]) and found[-1] < 4096

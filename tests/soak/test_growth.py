"""What is flat, and what grows."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.growth import growth


@given(st.integers(0, 1000), st.integers(20, 3000), st.floats(0.0, 0.3))
def test_noise_and_outliers_are_flat(seed: int, number: int, share_of_outliers: float) -> None:
    random = Random(seed)
    values = [100 + random.gauss(0, 5) + (1000 if random.random() < share_of_outliers / 3 else 0) for _ in range(number)]
    assert not growth([float(index) for index in range(number)], values).beyond(0.05, 5)


@given(st.integers(0, 1000), st.integers(100, 3000))
def test_a_slow_leak_is_seen_under_the_noise(seed: int, number: int) -> None:
    random = Random(seed)
    values = [100 + 20 * index / number + random.gauss(0, 5) for index in range(number)]
    found = growth([float(index) for index in range(number)], values)
    assert found.beyond(0.05, 5) and found.low < 18 * (1 - 1 / number) + 3 and found.high > 15 and found.last > found.first


def test_what_warms_up_is_no_leak() -> None:
    assert not growth([float(index) for index in range(200)], [min(index, 20) * 5.0 for index in range(200)]).beyond(0.05, 1)


def test_too_little_is_said() -> None:
    with pytest.raises(ValueError, match="3 values: must be at least 20"):
        growth([0.0, 1.0, 2.0], [1.0, 2.0, 3.0])

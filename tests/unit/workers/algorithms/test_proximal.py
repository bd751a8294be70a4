"""The log-linear proximal policy against its definition, one token at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.algorithms.proximal import loglinear_logprobs

LOGPROBS = st.floats(-20, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(LOGPROBS, LOGPROBS, st.integers(0, 50)), max_size=20), st.integers(0, 50))
def test_against_the_definition(tokens: list[tuple[float, float, int]], proximal_version: int) -> None:
    current, behavior = (torch.tensor([token[place] for token in tokens], dtype=torch.float64) for place in (0, 1))
    versions = torch.tensor([token[2] for token in tokens], dtype=torch.int32)
    expected = []
    for now, then, version in tokens:
        version = min(version, proximal_version)
        alpha = (proximal_version - version) / (proximal_version + 1 - version)
        expected.append(then + alpha * (now - then))
    assert loglinear_logprobs(current, behavior, versions, proximal_version).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_it_lies_between_and_has_no_gradient() -> None:
    current = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    found = loglinear_logprobs(current, torch.tensor([-2.0, -2.0, -2.0]), torch.tensor([4, 3, 0], dtype=torch.int32), 4)
    assert not found.requires_grad and found.tolist() == pytest.approx([-2.0, -1.5, -1.2])

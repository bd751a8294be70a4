"""Experts as servers tell them, and as they travel."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import RoutingShape
from workers.rollout.engines.chosen_experts import RoutingError, packed

SHAPE = RoutingShape(2, 1, 2, 8)


def told(experts: np.ndarray) -> str:
    return base64.b64encode(experts.astype("<i4").tobytes()).decode()


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(0, 2), st.integers(1, 5), st.sampled_from([5, 256, 257, 3000]), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_what_is_packed_is_what_was_told(layers: int, dense: int, per_token: int, experts: int, tokens: int, seed: int) -> None:
    shape, draw = RoutingShape(layers, dense, per_token, experts), np.random.default_rng(seed)
    chosen = draw.random((tokens - 1, dense + layers, experts)).argsort(-1)[..., :per_token]
    chosen[:, :dense] = 0
    content = packed(told(chosen), shape, tokens)
    assert len(content) == shape.token_bytes * (tokens - 1) == (tokens - 1) * layers * per_token * (1 if experts <= 256 else 2)
    assert np.array_equal(np.frombuffer(content, shape.dtype).reshape(tokens - 1, layers, per_token), chosen[:, dense:])


@pytest.mark.parametrize(("answer", "words"), [
    (None, "of 3 tokens and 3 layers, 2 of 8 experts"), ("no base64", "of 3 tokens"), (told(np.arange(12)), "of 3 tokens"),
    (told(np.tile([8, 1], 9)), "no such experts"), (told(np.tile([-1, 1], 9)), "no such experts"), (told(np.tile([3, 3], 9)), "one twice"),
    (told(np.tile([1, 2, 3], 9)), "of 3 tokens")])
def test_what_does_not_fit_the_model_is_refused(answer: str | None, words: str) -> None:
    with pytest.raises(RoutingError, match=rf"{words}.*algorithm.router_replay=off"):
        packed(answer, SHAPE, 4)

"""From a score to a reward: the scale, the penalty for running long, and what the config refuses."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.config import Config, ConfigError, ModelConfig, RewardConfig, RunConfig, RunKind, WorkflowConfig
from workers.reward.shaping import overlong, reward, scale


@pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1), (10**9, -1)])
def test_overlong_is_equation_13_of_dapo(num_tokens: int, penalty: float) -> None:
    """Its settings: 16384 tokens expected, a buffer of 4096."""
    assert overlong(num_tokens, 20480, 4096) == penalty


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 10**6), st.data())
def test_overlong_falls_from_0_to_minus_1_over_the_buffer(num_tokens: int, max_tokens: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(0, max_tokens))
    penalty = overlong(num_tokens, max_tokens, buffer)
    assert -1 <= penalty <= 0
    assert (penalty == 0) == (num_tokens <= max_tokens - buffer)
    assert overlong(num_tokens + 1, max_tokens, buffer) <= penalty
    assert overlong(max_tokens + 1, max_tokens, buffer) == -1


@settings(deadline=None)
@given(st.floats(0, 1), st.integers(0, 200))
def test_a_reward_is_its_scaled_score_less_the_penalty(score: float, num_tokens: int) -> None:
    config = RewardConfig()
    assert reward(score, num_tokens, config, 100) == scale(score, config)
    assert scale(0.0, config) == -5.0 <= scale(score, config) <= 5.0 == scale(1.0, config)
    shaped = replace(config, overlong_penalty=2.0, overlong_buffer=40)
    assert reward(score, num_tokens, shaped, 100) == scale(score, config) + 2 * overlong(num_tokens, 100, 40)


def test_a_full_reward_at_the_end_of_the_buffer() -> None:
    config = RewardConfig(correct=1.0, wrong=-1.0, overlong_penalty=1.0, overlong_buffer=10)
    assert [reward(1.0, num_tokens, config, 100) for num_tokens in (90, 95, 100)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(("values", "message"), [
    ({"parts": {"boxed": 0.0}}, "reward.parts.boxed=0.0: must be between 0 and 1"),
    ({"parts": {"boxed": math.nan}}, "reward.parts.boxed=nan"),
    ({"parts": {"boxed": 0.5, "exact": 0.5}}, "must add up to less than 1, not 1"),
    ({"parts": {"numeric": 0.5}}, "must not name reward.verifier='numeric'"),
    ({"verifier": "0.5*boxed+0.5*exact", "parts": {"number": 0.5}}, "must be empty"),
    ({"overlong_penalty": -1.0}, "reward.overlong_penalty=-1.0"),
    ({"overlong_penalty": 1.0}, "reward.overlong_buffer=0: must be positive with reward.overlong_penalty=1.0"),
    ({"overlong_buffer": -1}, "reward.overlong_buffer=-1"),
    ({"correct": math.inf}, "reward.correct=inf: must be finite"),
])
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        RewardConfig(**values).check()
    assert message in str(refusal.value)


def test_what_can_work_is_not() -> None:
    RewardConfig().check()
    RewardConfig(verifier="math_verify", parts={"boxed": 0.1, "format_tags": 0.1}, overlong_penalty=1.0, overlong_buffer=128).check()


def test_a_buffer_bounds_what_is_trained_and_no_evaluation() -> None:
    """`headway eval evaluation.run=RUN workflow.max_new_tokens=32` takes the run's rewards over."""
    def config(kind: RunKind) -> Config:
        return Config(run=RunConfig(kind=kind), workflow=WorkflowConfig(max_new_tokens=32), model=ModelConfig(path="model"),
                      reward=RewardConfig(overlong_penalty=1.0, overlong_buffer=64))

    config(RunKind.evaluation).check()
    with pytest.raises(ConfigError, match="reward.overlong_buffer=64: must be at most workflow.max_new_tokens=32"):
        config(RunKind.rl).check()

"""When a judge may be called."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.config.judge import JudgeConfig
from workers.reward.judges.call_policy import DOWN_AFTER, MAX_DELAY_S, CallPolicy


@given(st.lists(st.sampled_from(["begin", "scored", "failed", "given up"]), max_size=200), st.sampled_from(["drop", "0", "0.5"]))
def test_only_one_is_tried_while_the_judge_is_down_and_one_always_may(events: list[str], failed: str) -> None:
    policy, trying, in_a_row = CallPolicy(JudgeConfig(failed=failed)), 0, 0
    for event in events:
        if event == "begin":
            down = in_a_row >= DOWN_AFTER and failed != "drop"
            assert policy.begin() is (not down or not trying)
            if down and trying:
                assert policy.begin(strict=True), "nothing stands in for its score"
                policy.end(None)
            trying += not down or not trying
        elif trying:
            trying -= 1
            policy.end({"scored": True, "failed": False, "given up": None}[event])
            in_a_row = {"scored": 0, "failed": in_a_row + 1, "given up": in_a_row}[event]
        assert policy.in_a_row == in_a_row


@given(st.integers(0, 20), st.integers(0, 40))
def test_the_budget(most: int, wanted: int) -> None:
    policy = CallPolicy(JudgeConfig(max_calls=most))
    assert sum(policy.call() for _ in range(wanted)) == policy.num_calls == (min(most, wanted) if most else wanted)


@given(st.floats(0, 1e300), st.integers(0, 10_000))
def test_delays_grow_and_are_bounded(backoff_s: float, number: int) -> None:
    policy = CallPolicy(JudgeConfig(backoff_s=backoff_s))
    assert policy.delay_s(0) == min(MAX_DELAY_S, backoff_s) and policy.delay_s(number) <= policy.delay_s(number + 1) <= MAX_DELAY_S

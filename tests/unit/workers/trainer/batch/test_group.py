"""What a training group must be, and that the error names group, value and remedy."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from tests.support.groups import make_group as make_message
from workers.messages.arrays import Bool, Int32
from workers.trainer.batch.group import TrainGroup, check_per_response
from workers.trainer.train_step import to_train_group


def make_group() -> TrainGroup:
    return TrainGroup(
        group_id="g7", prompt=np.array([1, 2], np.int32), responses=[np.array([3, 4], np.int32), np.array([5], np.int32)],
        behavior_logprobs=[np.array([-1, -2], np.float32), np.array([-3], np.float32)],
        loss_mask=[np.array([True, True]), np.array([False])], rewards=np.array([1, -1], np.float32),
        versions=[np.zeros(2, np.int32), np.zeros(1, np.int32)])


def test_a_good_group_passes() -> None:
    group = make_group()
    group.behavior_logprobs[1][0] = np.nan  # not trained on
    group.check(vocab_size=6)
    assert (group.num_samples, group.num_valid_tokens) == (2, 2)


def put(name: str, index: int | None, value: object) -> Callable[[TrainGroup], None]:
    def change(group: TrainGroup) -> None:
        if index is None:
            setattr(group, name, value)
        else:
            getattr(group, name)[index] = value
    return change


@pytest.mark.parametrize(("change", "text"), [
    (put("prompt", None, np.array([], np.int32)), "prompt: is empty"),
    (put("prompt", None, np.array([1, 2], np.int64)), "prompt has dtype int64, it must be int32"),
    (put("prompt", None, np.array([[1, 2]], np.int32)), r"prompt has shape \(1, 2\)"),
    (put("responses", None, []), "has no responses"),
    (put("responses", 0, np.array([], np.int32)), "response 0: is empty"),
    (put("responses", 0, np.array([3, 6], np.int32)), "token 6 is outside the vocabulary of 6"),
    (put("responses", 0, np.array([3, -1], np.int32)), "token -1 is outside"),
    (put("behavior_logprobs", 0, np.array([-1, -2], np.float64)), "behavior_logprobs has dtype float64"),
    (put("behavior_logprobs", 0, np.array([-1], np.float32)), r"shape \(1,\), it must be \(2,\)"),
    (put("behavior_logprobs", 0, np.array([-1, -np.inf], np.float32)), "must be finite"),
    (put("loss_mask", 1, np.array([1], np.int32)), "loss_mask has dtype int32"),
    (put("versions", None, []), "versions has 0 entries for 2 responses"),
    (put("rewards", None, np.array([1, np.nan], np.float32)), "rewards .* must be finite"),
])
def test_bad_groups(change: Callable[[TrainGroup], None], text: str) -> None:
    group = make_group()
    change(group)
    with pytest.raises(ValueError, match=f"group g7.*{text}"):
        group.check(vocab_size=6)


def test_values_per_token_must_be_aligned_and_finite() -> None:
    group = make_group()
    check_per_response("values", [[np.zeros(2), np.array([np.nan])]], [group])
    for values, text in (([], "is for 0 groups"), ([[np.zeros(1), np.zeros(1)]], "not aligned"),
                         ([[np.array([0, np.inf]), np.zeros(1)]], "must be finite")):
        with pytest.raises(ValueError, match=text):
            check_per_response("values", values, [group])


def test_episodes_of_a_message_are_those_of_the_group() -> None:
    plain = make_message("g1", steps=[0] * 4, rewards=[1.0, 1.0, 1.0, -1.0])
    message = msgspec.structs.replace(plain, episodes=Int32.of([0, 0, 0, 1]), loss_mask=Bool.of([True, False, True, True]))
    group = to_train_group(message)
    group.check(vocab_size=6)
    assert group.episodes is not None and group.episodes.tolist() == [0, 0, 0, 1] and group.num_valid_tokens == 3


@pytest.mark.parametrize("episodes", [np.array([0], np.int32), np.array([0, 1], np.int64)])
def test_episodes_that_do_not_fit_the_responses_are_refused(episodes: np.ndarray) -> None:
    group = make_group()
    group.episodes = episodes
    with pytest.raises(ValueError, match="group g7: episodes has"):
        group.check(vocab_size=6)

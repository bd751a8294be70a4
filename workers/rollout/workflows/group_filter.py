"""Which finished groups are trained on (`workflow.keep`), decided where they were generated, so that a rejected one need not travel.

    finished group --> all | spread | package.module:function --> GroupFinished: its tokens are trained on
                                                              --> GroupRejected: its figures; the coordinator leases the next prompt instead

Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): a group whose rewards are all equal has no advantage, and its tokens no gradient.
Held-out prompts are never rejected.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workers.messages.from_worker import GroupFailed, GroupFinished, GroupRejected
from workers.messages.groups import group_firsts
from workers.messages.parts import Group, Purpose
from workers.run.user_code import import_function, told

Filter = Callable[[list[float], list[int]], bool]
"""A function of yours: the score of each of a group's episodes, and how many tokens each has after the prompt -> whether the group is trained on.
It runs in the rollout worker, between everything else that this does: it must be quick."""
MAX_CAUSE = 2000
"""Characters of a filter's error that are told."""


class GroupFilter:
    """The decision by `keep`: "all", "spread", or the import path of a `Filter`. Raises `ConfigError` where there is no such function."""

    def __init__(self, keep: str) -> None:
        self._keep = keep
        self._filter = import_function(keep, "workflow.keep") if ":" in keep else None

    def verdict(self, group: Group) -> GroupFinished | GroupRejected | GroupFailed:
        """What the coordinator is told of a finished group. A filter's error, or an answer that is no bool, is a failure that says where."""
        if group.purpose is Purpose.evaluation or self._keep == "all":
            return GroupFinished(group)
        kept = _has_spread(group) if self._filter is None else _judge(self._filter, group)
        if isinstance(kept, str):
            return GroupFailed(group.group_id, group.attempt, f"workflow.keep={self._keep!r}: {kept[:MAX_CAUSE]}", fatal=True)
        if kept:
            return GroupFinished(group)
        score = float(group.scores[group_firsts(group)].mean())
        return GroupRejected(group.group_id, group.attempt, int(group.loss_mask.sum()), group.tokens_interrupted, score)


def _has_spread(group: Group) -> bool:
    return bool(np.ptp(np.asarray(group.rewards)) != 0)  # also where one is NaN: such a group is refused, and told of


def _judge(function: Filter, group: Group) -> bool | str:
    """What `function` says of `group`; text where it fails."""
    firsts = group_firsts(group)
    try:
        answer = function(group.scores[firsts].tolist(), np.add.reduceat(np.asarray(group.lengths), firsts).tolist())
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything; the failure names it
        return told(error)
    if not isinstance(answer, bool | np.bool_):
        return f"it returned {answer!r}: must be True (the group is trained on) or False"
    return bool(answer)

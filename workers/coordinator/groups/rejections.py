"""How many groups are rejected (`workflow.keep`), and when that is too many. Pure.

    a group is judged: kept | rejected --> the last 8 batches' worth of groups: more than workflow.max_rejected of them? the run ends
                                       --> since the last training step: the figures of the next one

Whether a group is kept is decided where it was generated (rollout/workflows/group_filter.py). Its place is free again (ledger.py): the next prompt
is leased instead, at the present version, so the bounds of staleness.py hold for what is consumed, as after a failure.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from workers.messages.parts import Struct

WINDOW_BATCHES = 8
"""Over so many batches' worth of groups the share of rejected ones is reckoned."""


class Sampled(NamedTuple):
    """The groups judged between two training steps. `accuracy`: the mean score of all of them, rejected ones too; None without any."""

    num_rejected: int
    share_rejected: float
    accuracy: float | None


class RejectionsState(Struct, frozen=True):
    """See `Rejections`."""

    window: list[float | None]
    num_kept: int
    num_rejected: int
    score: float


class Rejections:
    """`window`: the last groups judged, None for a kept one, the mean of its scores for a rejected one. The rest is since the last step: how
    many were kept, how many rejected, and the sum of all their mean scores."""

    def __init__(self, keep: str, max_rejected: float, batch_groups: int) -> None:
        self.keep, self.max_rejected = keep, max_rejected
        self.window: deque[float | None] = deque(maxlen=WINDOW_BATCHES * batch_groups)
        self._num_kept = self._num_rejected = 0
        self._score = 0.0

    def kept(self, score: float) -> None:
        """Note a group that is trained on; `score`: the mean of its scores."""
        self.window.append(None)
        self._num_kept, self._score = self._num_kept + 1, self._score + score

    def rejected(self, score: float) -> str:
        """Note a rejected group; returns why the run must end, '' if it need not."""
        self.window.append(score)
        self._num_rejected, self._score = self._num_rejected + 1, self._score + score
        return self._too_many() if len(self.window) == self.window.maxlen and self.share > self.max_rejected else ""

    @property
    def share(self) -> float:
        """Which part of the last groups was rejected; 0 without any."""
        return sum(score is not None for score in self.window) / max(1, len(self.window))

    def _too_many(self) -> str:
        scores = [score for score in self.window if score is not None]
        return (f"{self.share:.0%} of the last {len(self.window)} groups were rejected (workflow.keep={self.keep}): must be at most "
                f"workflow.max_rejected={self.max_rejected:g}. The mean score of those is {sum(scores) / len(scores):.3f} (0: the prompts are too "
                "hard; 1: too easy). Give prompts that the model gets right sometimes, or more samples of each (workflow.group_size); "
                "workflow.keep=all trains on every group, and workflow.max_rejected=1 goes on however many are rejected")

    def next_step(self) -> Sampled:
        """The figures since the last step; the next step's begin."""
        judged = self._num_kept + self._num_rejected
        sampled = Sampled(self._num_rejected, self._num_rejected / max(1, judged), self._score / judged if judged else None)
        self._num_kept = self._num_rejected = 0
        self._score = 0.0
        return sampled

    def save(self) -> RejectionsState:
        """The state now."""
        return RejectionsState(list(self.window), self._num_kept, self._num_rejected, self._score)

    def restore(self, state: RejectionsState) -> None:
        """Go on from `state`."""
        self.window.clear()
        self.window.extend(state.window)
        self._num_kept, self._num_rejected, self._score = state.num_kept, state.num_rejected, state.score

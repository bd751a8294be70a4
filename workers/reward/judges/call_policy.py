"""Whether the judge may be called, and when again. Pure.

    DOWN_AFTER questions in a row without a score --> it is down: one question at a time is tried and all others fail at once, until one has its score

Only where a score stands in for what has none (reward.judge.failed): else the score is worth waiting for.
"""

from __future__ import annotations

from workers.config.judge import JudgeConfig

DOWN_AFTER = 8
MAX_DELAY_S = 60.0
BUSY = (408, 409, 425, 429)
"""Statuses below 500 after which the same request may be answered."""


class CallPolicy:
    """`num_calls`: those made. `in_a_row`: questions without a score since the last that had one."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self.num_calls = self.in_a_row = self._trying = 0

    def begin(self, strict: bool = False) -> bool:
        """A question has its turn; false where it is not to be tried, but for a `strict` one, for which nothing stands in. Each that is ends with
        `end`."""
        if self._trying and not strict and self.in_a_row >= DOWN_AFTER and self._config.stand_in is not None:
            return False
        self._trying += 1
        return True

    def end(self, scored: bool | None) -> None:
        """It has its score, or none; None: it was given up, which says nothing of the judge."""
        self._trying -= 1
        self.in_a_row = self.in_a_row if scored is None else 0 if scored else self.in_a_row + 1

    def call(self) -> bool:
        """Count a call; false where reward.judge.max_calls are used up."""
        if self._config.max_calls and self.num_calls >= self._config.max_calls:
            return False
        self.num_calls += 1
        return True

    def delay_s(self, number: int) -> float:
        """Seconds before retry `number`, from 0 on."""
        return min(MAX_DELAY_S, self._config.backoff_s * 2.0 ** min(number, 30))

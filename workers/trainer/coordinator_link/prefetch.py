"""When the coordinator may be asked for a batch: it forms one for the step that it is at, and for the next while that one's is in training.

The trainer may be ahead of it by a step, because versions are announced a while after training has gone on. Pure.
"""

from __future__ import annotations


class Prefetch:
    """Each method returns the steps whose batches are to be asked for now, none or one."""

    def __init__(self) -> None:
        self._asked = self._announced = -1
        self._waiting: tuple[int, int] | None = None

    def want(self, step: int, announced: int) -> list[int]:
        """The batch of `step` is wanted, once the version `announced` is. That is `step`, or the one before for somebody who has its batch."""
        if step > self._asked:
            self._asked, self._waiting = step, (step, announced)
        return self._due()

    def announced(self, step: int) -> list[int]:
        """The coordinator has been told that version `step` is published."""
        self._announced = step
        return self._due()

    def again(self) -> None:
        """What was asked for may have been lost: it is asked for again when it is wanted again."""
        self._asked = -1

    def _due(self) -> list[int]:
        if self._waiting is None or self._waiting[1] > self._announced:
            return []
        (step, _), self._waiting = self._waiting, None
        return [step]

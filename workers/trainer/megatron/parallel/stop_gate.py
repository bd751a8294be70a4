"""Abandoning a training step, by all ranks or by none.

A rank asks before every micro-batch whether it is to stop; one that is leaves out the rest of its work up to the next
boundary. There the ranks agree (one all-reduce): if any noticed, all raise StepAbandoned. The boundaries lie where the
ranks are in step and before anything of theirs has changed: at the beginning, before the first minibatch, and between
its gradients and their reduction, or before its last micro-batch, where that begins the reduction (trained_model.py). From then on
the step is finished and nobody is asked. The ranks of a copy of the model need each other for every micro-batch, so they
agree before each; where stages or experts are spread out, nobody is asked before the next boundary: all ranks have begun the reduction
by then, and end it before the next minibatch.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.trainer.megatron.parallel import collectives


def never() -> bool:
    """For a step that nobody stops."""
    return False


class StepAbandoned(Exception):
    """A training step was given up before its first update: weights, optimizer and schedule are those before it."""


class StopNoticed(Exception):
    """This rank is to stop, and leaves the pass that it is in. Never leaves the engine."""


class StopGate:
    """One training step's view of `requested`, which is called on this thread, between micro-batches only."""

    def __init__(self, requested: Callable[[], bool], step: int = 0) -> None:
        self._requested, self._step = requested, step
        self._noticed = self._closed = False

    def before_microbatch(self) -> None:
        """Raise StopNoticed where this rank, or another one of its copy, is to stop, unless it is too late for that."""
        if self._closed:
            return
        self._noticed = collectives.any_in_copy(self._notices())
        if self._noticed:
            raise StopNoticed

    def agree(self, last: bool = False) -> None:
        """Raise StepAbandoned on all ranks where one was asked to stop; after the `last` time nobody is asked any more."""
        if self._closed:
            return
        if collectives.any_rank(self._notices()):
            raise StepAbandoned(f"training step {self._step} was abandoned on request before its first update. "
                                "The weights are those before it: save the state, or take the step again")
        self._closed = last

    def _notices(self) -> bool:
        if not self._closed and not self._noticed:
            self._noticed = bool(self._requested())
        return self._noticed

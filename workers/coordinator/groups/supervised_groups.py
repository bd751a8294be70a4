"""Where the groups of a supervised run come from: the data set, in the order of its prompts, without any worker. Pure.

    example k of the data set --> lease and result at once: group g<k>, one sample --> ledger: finished --> batch, as in any other run

Just enough groups are finished for the batch that the trainer asks for next, so batch s holds examples s B to (s + 1) B - 1 (later ones
where some cannot be trained on, which are set aside). Everything else is as it is with rollouts: each example is consumed once at its
place, a checkpoint holds what is consumed, a step that is given up gives its groups back.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from workers.coordinator.groups.group_states import Leased
from workers.coordinator.groups.ledger import Ledger
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.parts import Group, Purpose

MAX_UNUSABLE = 100
"""So many examples in a row that cannot be trained on end the run."""


class Example(Protocol):
    """Token ids of a prompt and of the response to learn."""

    @property
    def id(self) -> str: ...
    @property
    def prompt(self) -> list[int]: ...
    @property
    def response(self) -> list[int]: ...
    def problem(self, context_length: int) -> str: ...


class TrainingExamples(Protocol):
    """Training examples by index, endlessly."""

    def train(self, index: int) -> Example: ...


class Supervision:
    """Fills the ledger. Samples have at most `context_length` tokens, with their prompt."""

    def __init__(self, examples: TrainingExamples, ledger: Ledger, batch_groups: int, context_length: int) -> None:
        self.examples, self._ledger, self._batch_groups, self._context_length = examples, ledger, batch_groups, context_length
        self._num_unusable = 0

    def fill(self, epoch: int, step: int) -> str:
        """Have a batch of finished groups ready, for training step `step`; returns why the run must end, '' if it need not."""
        while len(self._ledger.finished) < self._batch_groups:
            leased = self._ledger.lease(b"", step)
            example = self.examples.train(leased.prompt_index)
            problem = example.problem(self._context_length)
            if not problem:
                self._num_unusable = 0
                self._ledger.finish(_group(leased, example, epoch, step))
                continue
            self._ledger.fail(leased.group_id, leased.attempt, problem, fatal=True)
            self._num_unusable += 1
            if self._num_unusable >= MAX_UNUSABLE:
                return f"{MAX_UNUSABLE} examples in a row cannot be trained on; the last one: {problem}"
        return ""


def _group(leased: Leased, example: Example, epoch: int, step: int) -> Group:
    """As if the version that is to be trained had given the response: nothing is stale."""
    length = len(example.response)
    return Group(
        group_id=leased.group_id, attempt=leased.attempt, purpose=Purpose.training, prompt_id=example.id, prompt=Int32.of(example.prompt),
        lengths=Int32.of([length]), tokens=Int32.of(example.response), logprobs=Float32.of(np.zeros(length, np.float32)),
        loss_mask=Bool.of(np.ones(length, np.bool_)), rewards=Float32.of([0.0]), scores=Float32.of([0.0]),
        epochs=Int32.of([epoch]), steps=Int32.of([step]), run_lengths=Int32.of([length]))

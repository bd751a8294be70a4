"""The self-test of a run: are the engines' log-probs those of the trainer, for tokens that both computed from the same weights?

    a share of a batch --> tokens sampled by exactly the trainer's present version --engine.train_step--> gap, over all ranks
                                                                                                        |  before the first update
    no cause to go on: SelfTestFailed, or a warning, with the likely causes (diagnosis.py) <--judge--+--> agreed: training goes on

It costs nothing: the log-probs are those of the first minibatch's own training pass. The gap of every step is in the metrics. It is judged
twice in an incarnation: of the weights that it begins with, and of the first weights that were published after an update. Pure but for `tell`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from workers.algorithms.agreement import Agreement
from workers.config import Config, Interrupt, SelfTestAction
from workers.messages.from_coordinator import Batch
from workers.messages.parts import Group, Version
from workers.model.architecture import Architecture
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import Comparison
from workers.trainer.megatron.objective import TokenMasks, TokenValues
from workers.trainer.selftest.diagnosis import Circumstances, compared_tokens, likely_causes, temperatures

MIN_TOKENS = 64
"""Fewer than these are judged only where they are all that there is: single tokens may lie far apart in half precision."""


class SelfTestFailed(RuntimeError):
    """Engine and trainer disagree; nothing has been updated. The text says by how much, and the likely causes."""


def fresh_tokens(group: Group, version: Version) -> list[np.ndarray]:
    """Which tokens `version` has sampled, bool by sample: its step and its epoch, as another epoch's weights of the same step may be others."""
    by_run = (np.asarray(group.epochs) == version.epoch) & (np.asarray(group.steps) == version.step)
    return np.split(np.repeat(by_run, np.asarray(group.run_lengths)), np.cumsum(np.asarray(group.lengths))[:-1])


@dataclass
class SelfTest:
    """One rank's; all ranks come to the same results. `begins_with`: the version that this incarnation begins with."""

    config: Config
    architecture: Architecture
    begins_with: Version
    tell: Callable[[str], None]
    _judged: set[bool] = field(default_factory=set)
    _agreed: Agreement | None = None
    _above: bool = False

    def comparison(self, share: Batch, groups: list[TrainGroup]) -> Comparison | None:
        """What the engine is to compare in the step that trains on `share`, as `groups`; None where there is nothing to test."""
        if self.config.self_test_action is SelfTestAction.off:
            return None
        version = Version(self.begins_with.epoch, share.step)
        fresh = [self._comparable(fresh_tokens(group, version)) for group in share.groups]
        return Comparison(fresh, partial(self._judge, version, groups, fresh))

    def _comparable(self, fresh: list[np.ndarray]) -> list[np.ndarray]:
        """Kept over updates (in_place), the cache of other tokens of a group is that of older weights, and so are this group's log-probs."""
        if self.config.engine.interrupt is not Interrupt.in_place or all(row.all() for row in fresh):
            return fresh
        return [np.zeros_like(row) for row in fresh]

    def _judge(self, version: Version, groups: list[TrainGroup], fresh: TokenMasks, found: Agreement,
               logprobs_at: Callable[[float], TokenValues]) -> None:
        """Raise `SelfTestFailed`, or tell, where `found` is too much, the first time for starting and for updated weights; later on only tell."""
        if not found.num_tokens or (found.num_tokens < MIN_TOKENS and found.share < 1):
            return
        agrees = math.isfinite(found.mean) and found.mean <= self.config.mean_tolerance
        updated = version.step > self.begins_with.step
        if updated in self._judged or (updated and not self._judges_updates):
            self._watch(version, found, agrees)
            return
        self._judged.add(updated)
        self._above = not agrees
        if agrees:
            self._agreed = self._agreed or found
            self.tell(f"self-test of version {version}: engine and trainer agree, their log-probs differ by {found} "
                      f"(selftest.mean_tolerance={self.config.mean_tolerance:g})")
            return
        text = self._verdict(version, found, self._causes(groups, fresh, updated, logprobs_at))
        if self.config.self_test_action is SelfTestAction.warn:
            self.tell(f"warning: {text}")
            return
        raise SelfTestFailed(f"{text}\nThe update was not made; all checkpoints are as they were. selftest.action=warn trains all the same")

    @property
    def _judges_updates(self) -> bool:
        """A cache that is kept over updates is that of other weights, unless these do not move: the gap is then no fault."""
        return self.config.engine.interrupt is not Interrupt.in_place or not self.config.trainer.lr

    def _watch(self, version: Version, found: Agreement, agrees: bool) -> None:
        if self._above is agrees:
            self._above = not agrees
            word = "again within" if agrees else "now above"
            self.tell(f"self-test of version {version}: the log-probs of engine and trainer differ by {found}, {word} "
                      f"selftest.mean_tolerance={self.config.mean_tolerance:g}")

    def _causes(self, groups: list[TrainGroup], fresh: TokenMasks, updated: bool, logprobs_at: Callable[[float], TokenValues]) -> list[str]:
        given = self.config.workflow.temperature
        tokens = compared_tokens(groups, fresh, {temperature: logprobs_at(temperature) for temperature in temperatures(given)}, given)
        return likely_causes(tokens, Circumstances(self.config, self.architecture, self._agreed if updated else None))

    def _verdict(self, version: Version, found: Agreement, causes: list[str]) -> str:
        head = (f"self-test of version {version}: the log-probs of engine and trainer differ by {found}; "
                f"selftest.mean_tolerance={self.config.mean_tolerance:g}. Likely causes:")
        return "\n".join([head, *(f"  {number}. {cause}" for number, cause in enumerate(causes, 1))])

"""Which steps of the past still count. Pure.

A hard kill sets training back to its last checkpoint: the steps after that are another lineage, whose weights are lost. What they
sampled stays valid (its behaviour log-probs are known), but a token of a lost step counts as sampled at the step that was restored:
never younger than that, so that staleness is never negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from workers.messages.arrays import Int32
from workers.messages.parts import Group, Partial, Version


@dataclass
class Lineage:
    """`forks[epoch]` is the step that this epoch's trainer began with; versions of earlier epochs beyond it are lost."""

    forks: dict[int, int] = field(default_factory=dict)

    def effective(self, epochs: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The steps that versions (epochs[i], steps[i]) count as, int32."""
        counted = np.array(steps, dtype=np.int32)
        for epoch, step in self.forks.items():
            counted = np.where((epochs < epoch) & (counted > step), step, counted)
        return counted

    def step_of(self, version: Version) -> int:
        """The step that `version` counts as."""
        return int(self.effective(np.array([version.epoch]), np.array([version.step]))[0])

    def rebase(self, piece: Group | Partial) -> Group | Partial:
        """`piece` with the steps that its tokens count as."""
        counted = self.effective(np.asarray(piece.epochs), np.asarray(piece.steps))
        return piece if np.array_equal(counted, piece.steps) else msgspec.structs.replace(piece, steps=Int32.of(counted))

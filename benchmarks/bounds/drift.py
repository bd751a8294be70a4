"""`staleness.control=divergence` in virtual time: a policy that moves, at a speed that changes, and how the lead follows.

    the real coordinator, between models of engines and of a trainer (simulation.py)
    trainer: tokens of version a in step v --noise--> nats they lie apart: (sum over the steps between of speed^(1/power))^power + mismatch

`power` 1: a policy that goes straight on; 1/2: one that wanders. Mismatch: what engine and trainer differ by on the same weights.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from benchmarks.bounds.figures import figures_of
from benchmarks.bounds.simulation import Setting, Simulation
from workers.config import Config, Control
from workers.messages.groups import token_steps

NOISE = 0.15
"""Standard deviation of a step's measurement, as a share of it."""


@dataclass(frozen=True)
class Drifting(Setting):
    """A run whose policy moves by `speed` nats a step, `faster` times that from step `at` on; `budget`: `staleness.max_divergence`."""

    budget: float = 0.1
    speed: float = 0.05
    power: float = 1.0
    faster: float = 1.0
    at: int = 0
    mismatch: float = 0.0

    def config(self) -> Config:
        """As a run's, with its budget."""
        config = super().config()
        config.staleness.control, config.staleness.max_divergence = Control.divergence, self.budget
        return config

    def apart(self, version: np.ndarray, step: int) -> np.ndarray:
        """Nats between the policies of `version` and of `step`, without mismatch."""
        speeds = np.full(step, self.speed)
        speeds[self.at:] *= self.faster
        gone = np.concatenate([[0.0], np.cumsum(speeds ** (1 / self.power))])
        return (gone[step] - gone[np.minimum(version, step)]) ** self.power


class Drift(Simulation):
    """`leads`, `apart`: after every step, the lead in steps, and how far the tokens of its batch lay apart in nats, without noise."""

    setting: Drifting

    def __init__(self, setting: Drifting) -> None:
        super().__init__(setting)
        self.leads: list[float] = []
        self.apart: list[float] = []
        self._noise = np.random.default_rng((setting.seed, 1))

    def _end_step(self) -> None:
        versions = np.concatenate([token_steps(group) for group in self._batches[self._step].groups])
        self.apart.append(float(self.setting.apart(versions, self._step).mean()) + self.setting.mismatch)
        self.metrics = {"gap_proximal_behavior": self.apart[-1] * float(np.exp(self._noise.normal(0, NOISE)))}
        super()._end_step()
        self.leads.append(self.core.policy.ahead(self._step))


@dataclass(frozen=True)
class Course:
    """A run in figures: `lead` in steps, its mean and standard deviation; `apart` in nats; `over`: share of steps more than a quarter beyond the
    budget; `speed`: of the ideal."""

    lead: float
    deviation: float
    apart: float
    over: float
    speed: float


def course(setting: Drifting) -> Course:
    """Play it; the steps that count."""
    played = Drift(setting)
    played.run()
    found = figures_of(played)
    leads, apart = np.array(played.leads[setting.warm_up:]), np.array(played.apart[setting.warm_up:])
    far = apart > 1.25 * setting.budget
    return Course(*(round(float(value), 3) for value in (leads.mean(), leads.std(), apart.mean(), far.mean(), found.speed)))


def cases(base: Drifting) -> dict[str, Drifting]:
    """What a policy may do."""
    late = base.warm_up
    return {
        "straight": base, "wanders": dataclasses.replace(base, power=0.5),
        "three times as fast later": dataclasses.replace(base, faster=3.0, at=late),
        "a third as fast later": dataclasses.replace(base, faster=1 / 3, at=late), "very slow": dataclasses.replace(base, speed=0.004),
        "mismatch of half the budget": dataclasses.replace(base, mismatch=0.05),
        "mismatch beyond the budget": dataclasses.replace(base, mismatch=0.12), "very fast": dataclasses.replace(base, speed=0.3),
        "very slow, trainer too": dataclasses.replace(base, speed=0.004, fleet=dataclasses.replace(base.fleet, balance=0.5))}

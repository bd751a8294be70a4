"""How far rollouts are let ahead with `staleness.control=divergence`: as far as trainer and engines need it to go on without waiting for each other,
and what is trained on stays within the budget. A pure state machine.

    a training step is finished: how far the policies that sampled lay from the one in training, as shares of the budget --+
                                 how old its tokens were ------------------------------------------------------------------+--> Lead.lead
                                 how many batches were ready for the next steps -------------------------------------------+
                                 how much of the engines' room stayed empty for want of lead (HeldBack) -------------------+
    StalenessPolicy.ahead = the smaller of eta's own rule and the lead --> admission

Both are measured of the same tokens, so that it does not matter how long ago these were admitted: at a mean age A the divergence is the share p of
its budget, so at A / p it would be all of it. The lead goes there: down at once, up by at most a factor of PACE a step. (Long answers may make A
more than the lead under which they were admitted; then that stands for A.) Where divergence grows slower or faster than age, but slower than its
square, it ends where p = 1; overshoot is of one step's growth. Means are over the last MEMORY steps.

It begins at 0: nothing runs ahead before something has been measured. Within the budget it widens where the trainer has to wait at a step's end, and
engines had room meanwhile, now and on average, for which nothing was admitted: engines that are full are not made faster. While more than READY
batches wait for it, now and on average, it narrows by as much, from the lead under which these were admitted: they are older than anybody needs.
Beyond the budget nothing widens, and where nothing could be measured it narrows. eta's bounds hold whatever is measured: the lead only holds back.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping

from workers.config import Control, StalenessConfig
from workers.messages.parts import Struct

ENOUGH = 1.0
"""Steps: the next batch is sampled while one is trained on. Batches that wait narrow it no further."""
PACE, LEAST_PACE = 1.25, 0.25
"""Widening in a step: at most by this factor, or by so many steps."""
MEMORY = 3.0
"""Training steps that means are over."""
LOOK_BACK = 100
"""Leads that are known, one for each step; what is older was admitted under the oldest of them."""
LEAST_AGE = 0.25
"""Steps: a batch that is younger says little of what age costs. It is taken for one of this age, and as long as it is within the budget it narrows
nothing."""
READY = 1.5
"""Batches, with the next one, that are ready when a step is finished, and enough."""
HELD_BACK = 0.02
"""The share of the engines' room that stays empty, and is worth more lead."""
HYSTERESIS = 0.05
"""A change that is not worth making, in steps, or as a share of the lead."""


class LeadState(Struct, frozen=True):
    """What a checkpoint holds of it; see `Lead`."""

    lead: float
    pressure: float
    age: float
    weight: float
    reason: str
    leads: list[float]
    ready: float = 0.0
    held_back: float = 0.0


class HeldBack:
    """The share of the engines' room for training groups that stays empty because staleness admits no more: its mean by time since the last training
    step. Their room is what they take, so that there is always a sample at hand when one ends: a little more than they decode at once."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._share = self._elapsed_s = self._empty_s = 0.0

    def look(self, now: float, share: float) -> None:
        """Note that it is `share` from now on."""
        self._until(now)
        self._share = share

    def mean(self, now: float) -> float:
        """What it was on average since `restart`."""
        self._until(now)
        return self._empty_s / self._elapsed_s if self._elapsed_s else 0.0

    def restart(self, now: float) -> None:
        """A training step is finished."""
        self._until(now)
        self._elapsed_s = self._empty_s = 0.0

    def excuse(self, pause_s: float) -> None:
        """This process did not run for so long until now: nobody knows how it was."""
        self._at = None if self._at is None else self._at + pause_s

    def _until(self, now: float) -> None:
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at, self._elapsed_s, self._empty_s = now, self._elapsed_s + passed, self._empty_s + passed * self._share


class Lead:
    """The lead that `staleness` allows; infinite with `control=eta`, where its own rule is all there is. `reason`: why it is where it is."""

    def __init__(self, staleness: StalenessConfig) -> None:
        self._staleness = staleness
        self.controlled = staleness.control is Control.divergence
        self._most = staleness.eta if staleness.target is None else min(staleness.target, staleness.eta)
        self.lead = 0.0 if self.controlled else math.inf
        self.reason = "it begins here" if self.controlled else ""
        self._pressure = self._age = self._weight = self._ready = self._held_back = 0.0
        self._leads = deque([0.0], maxlen=LOOK_BACK)  # of the version that is in training, and back

    def finished(self, step: int, metrics: Mapping[str, float], age: float, furthest: float, ready: float, held_back: float,
                 moved: bool = True) -> None:
        """Training step `step` is finished, with these metrics of the trainer, on tokens of the mean age `age` in steps. `furthest`: how far ahead
        eta's own rule lets rollouts run from now on; `ready`: batches that wait for the trainer, with the next one, 0 where that cannot be
        formed yet; `held_back`: see `HeldBack`; `moved`: whether the policy moves yet, without which a measurement says nothing, and age does no
        harm."""
        if self.controlled:
            self._ready += (ready - self._ready) / MEMORY
            self._held_back += (held_back - self._held_back) / MEMORY
            if moved:
                allowed = min(age, self._leads[max(0, len(self._leads) - 1 - round(age))])
                self._follow(step, metrics, allowed, age, ready, held_back)
            elif ready < 1:
                self._widen(ENOUGH, f"the policy does not move yet in step {step}")
            self._leads.append(min(self.lead, furthest))

    def _follow(self, step: int, metrics: Mapping[str, float], allowed: float, age: float, ready: float, held_back: float) -> None:
        """`allowed`: the mean age, or, where that is less, the lead under which the tokens were admitted."""
        found = pressures(self._staleness, metrics)
        if not found or not all(math.isfinite(share) for share, _ in found):
            self._narrow(self.lead / PACE, f"step {step} brought no measurement")
            return
        share, words = max(found)
        self._weight = min(MEMORY, self._weight + 1)
        self._pressure += (share - self._pressure) / self._weight
        self._age += (allowed - self._age) / self._weight
        words = f"{words} at a mean age of {age:.2g} in step {step}"
        if max(share, self._pressure) >= 1:
            self._narrow(self._age / max(self._pressure, 1e-9), words)
            return
        wanted = max(self._age, LEAST_AGE) / self._pressure if self._pressure else math.inf
        if wanted < self.lead and self._age >= LEAST_AGE:
            self._narrow(wanted, words)
        elif ready < 1 and min(held_back, self._held_back) > HELD_BACK:
            self._widen(wanted, f"{words}; it left {held_back:.0%} of the engines' room empty")
        elif (spare := min(ready, self._ready) - READY) > 0:
            then = max(itertools.islice(reversed(self._leads), math.ceil(ready) + 1))
            self._narrow(max(then - spare, ENOUGH), f"{ready:.2g} batches wait for the trainer after step {step}")

    def _narrow(self, wanted: float, why: str) -> None:
        if self.lead - wanted > HYSTERESIS * self.lead:
            self.lead, self.reason = wanted, f"narrowed: {why}"

    def _widen(self, wanted: float, why: str) -> None:
        wanted = min(wanted, self._most, max(self.lead * PACE, self.lead + LEAST_PACE))
        if wanted - self.lead > HYSTERESIS * max(1.0, self.lead) or self.lead < wanted == self._most:
            self.lead, self.reason = wanted, f"{'as wide as eta allows' if wanted == self._most else 'widened'}: {why}"

    def save(self) -> LeadState | None:
        """For a checkpoint; None where nothing is controlled."""
        if not self.controlled:
            return None
        return LeadState(self.lead, self._pressure, self._age, self._weight, self.reason, list(self._leads), self._ready,
                         self._held_back)

    def restore(self, state: LeadState) -> None:
        """Go on from a checkpoint; eta may have another value now."""
        if self.controlled:
            self.lead, self.reason = min(state.lead, self._most), state.reason
            self._pressure, self._age, self._weight = state.pressure, state.age, state.weight
            self._ready, self._held_back = state.ready, state.held_back
            self._leads.clear()
            self._leads.extend(state.leads)


def pressures(staleness: StalenessConfig, metrics: Mapping[str, float]) -> list[tuple[float, str]]:
    """What was measured as a share of each budget that is given, and in words; not a number where it was not measured.

    Of an effective sample size 1/n the variance of the weights, 1/n - 1, is compared, by its root: for small gaps that grows with them.
    """
    found = []
    for budget, name, what in ((staleness.max_divergence, "gap_proximal_behavior", "mean"),
                               (staleness.max_divergence_p99, "gap_proximal_behavior_p99", "99% within")):
        if budget is not None:
            value = metrics.get(name, math.nan)
            found.append((value / budget, f"{what} {value:.2g} of {budget:g} nats"))
    if staleness.min_ess is not None:
        value = metrics.get("behavior_ess", math.nan)
        spread = math.sqrt((1 / value - 1) / (1 / staleness.min_ess - 1)) if 0 < value <= 1 else math.nan
        found.append((spread, f"effective sample size {value:.2g}, must be {staleness.min_ess:g}"))
    return found

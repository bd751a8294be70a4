"""How many training groups run at once over all workers: `rollout.concurrency`, a number or `auto`. A pure state machine; time is an argument.

    look(what runs, who waits)  began(group)  ended(group)  --> what engines bring at each load, what the trainer takes
                                                                  decide, once a training step --> limit

`auto` looks for the smallest number with which neither engines nor trainer bring less than they could. More groups wait for each other or in the
buffer, and are older when they are trained on.

Of every finished group two things are known: for how long it ran, and the mean load x meanwhile, in groups an engine. By Little's law an engine ends
x / y(x) groups in a unit of time, where y is the mean time that a group runs. It is counted a token of the group's longest episode, so that longer
answers are not taken for slower engines. Samples that are decoded side by side each slow a decoding step by the same time: y = alpha + beta * x,
fitted to what was seen at each level of load. The limit goes to the smaller of
- the load at which engines bring SATURATED of what they do with all their room in use;
- the load at which they bring as much as the trainer takes while it does not wait, a little more where the buffer is short of BUFFER batches,
  a little less where it holds more.

A latency counts for at most PACE times what the line says, so that an outage, which delays all that runs, is not taken for what load does.

It moves by at most a factor of PACE a step, not at all within HYSTERESIS, and stays between one group an engine and all their room. It is kept by
engine, and so follows engines that come or go at once. It only ever holds leases back: what may be admitted at all is said by staleness.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from workers.config.generation import AUTO
from workers.messages.groups import group_episodes
from workers.messages.parts import Group, Struct

SATURATED = 0.97
"""The share of what engines bring with all their room in use that is worth more groups."""
PACE = 1.25
"""Factor between two levels of load, and the most that the limit changes by in a training step."""
HYSTERESIS = 0.05
"""A change of the limit that is not worth making, as a share of it."""
MEMORY = 8.0
"""Training steps that means are over."""
BUFFER, GAIN = 0.5, 0.1
"""Batches that are to be finished when a step is; how much more engines bring, as a share, for each that is missing."""
MIN_LEVELS = 3
"""Levels of load that must have been seen before the latencies are trusted."""


class LevelState(Struct, frozen=True):
    """See `Level`."""

    load: float
    latency: float
    weight: float


class ConcurrencyState(Struct, frozen=True):
    """What a checkpoint holds of it; see `Concurrency`. `load`: the limit an engine; 0 where there was none yet."""

    load: float
    levels: dict[int, LevelState]


@dataclass
class Level:
    """What was seen at about one load: its mean, in groups an engine; seconds a token of the longest episode; from how many steps."""

    load: float = 0.0
    latency: float = 0.0
    weight: float = 0.0

    def add(self, load: float, latency: float) -> None:
        """Take in what was seen in one more step."""
        self.weight = min(MEMORY, self.weight + 1)
        self.load += (load - self.load) / self.weight
        self.latency += (latency - self.latency) / self.weight


@dataclass
class Seen:
    """Since the last decision: the time that the trainer did not wait for a batch; of the groups that ended, how many, their seconds, load times
    seconds, and tokens of their longest episodes."""

    taken_s: float = 0.0
    num_groups: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    tokens: int = 0


def longest(group: Group) -> int:
    """Tokens of the group's longest episode: its samples run side by side."""
    return int(np.bincount(group_episodes(group), weights=np.asarray(group.lengths)).max())


@dataclass(frozen=True)
class Line:
    """Latencies of groups, alpha + beta * load; neither is negative, one is not 0."""

    alpha: float
    beta: float

    def rate(self, load: float) -> float:
        """What an engine brings at this load: tokens of longest episodes a second."""
        return load / (self.alpha + self.beta * load)

    def load(self, rate: float) -> float:
        """The smallest load that brings `rate`; infinite where none does."""
        return self.alpha * rate / (1 - self.beta * rate) if self.beta * rate < 1 else math.inf


def line_through(levels: Iterable[Level]) -> Line:
    """The line that fits best to what was seen at two or more levels: latencies do not fall, and rates neither, as loads grow."""
    seen = list(levels)
    weights = np.array([level.weight for level in seen])
    loads, latencies = np.array([level.load for level in seen]), np.array([level.latency for level in seen])
    mean_load, mean_latency = np.average(loads, weights=weights), np.average(latencies, weights=weights)
    spread = float(np.average((loads - mean_load) ** 2, weights=weights))
    beta = float(np.average((loads - mean_load) * (latencies - mean_latency), weights=weights)) / spread if spread else 0.0
    beta = min(max(0.0, beta), float(mean_latency / mean_load))
    return Line(max(0.0, float(mean_latency - beta * mean_load)), beta)


class Concurrency:
    """The limit on running training groups. `configured`: groups, or `AUTO`, which begins with enough for one batch of `batch_groups`."""

    def __init__(self, configured: int | str, batch_groups: int) -> None:
        self.auto = configured == AUTO
        self.limit = batch_groups if isinstance(configured, str) else configured
        self.levels: dict[int, Level] = {}
        self.load = 0.0
        self._batch_groups, self._num_engines, self._room = batch_groups, 0, 0
        self._taken_s, self._tokens, self._num_steps = 0.0, 0.0, 0.0
        self._reached = self._starved = False
        self._at, self._load_now, self._load_s = 0.0, 0.0, 0.0
        self._began: dict[str, tuple[float, float]] = {}
        self._seen = Seen()

    def look(self, now: float, num_running: int, others: float, num_engines: int, room: int, starved: bool) -> None:
        """Note how things are from now on: training groups that run, what else does in groups' worth of samples, engines that take leases, for
        how many groups these have room, and whether the trainer waits for a batch."""
        if not self.auto:
            return
        self._until(now)
        self._load_now = (num_running + others) / num_engines if num_engines else 0.0
        self._reached, self._starved = self._reached or num_running >= self.limit, starved
        if num_engines and (num_engines, room) != (self._num_engines, self._room):
            self._num_engines, self._room = num_engines, max(room, num_engines)
            self._set(self.load if self.levels else self._batch_groups / num_engines)

    def _until(self, now: float) -> None:
        self._load_s += (now - self._at) * self._load_now
        self._seen.taken_s += (now - self._at) * (not self._starved)
        self._at = now

    def excuse(self, pause_s: float) -> None:
        """This process did not run for so long until now: nobody knows how it was."""
        self._at += pause_s
        self._began = {group_id: (at + pause_s, load_s) for group_id, (at, load_s) in self._began.items()}

    def _set(self, load: float) -> None:
        self.load = min(max(load, 1.0), self._room / self._num_engines)
        self.limit = math.floor(self.load * self._num_engines + 0.5)

    def began(self, group_id: str, now: float, whole: bool = True) -> None:
        """Note that a group has been leased; unless `whole`, it only goes on, and is not measured."""
        if self.auto:
            self._until(now)
            self._began.pop(group_id, None)
            if whole:
                self._began[group_id] = now, self._load_s

    def ended(self, group: Group, now: float) -> None:
        """Note that a group is finished."""
        began = self._began.pop(group.group_id, None)
        if began is not None and now > began[0]:
            self._until(now)
            self._seen.num_groups += 1
            self._seen.seconds += now - began[0]
            self._seen.load_seconds += self._load_s - began[1]
            self._seen.tokens += longest(group)

    def decide(self, now: float, running: Mapping[str, object], num_finished: int) -> None:
        """A training step is finished: learn from its groups and move the limit. `running`: the groups that still run, by id; `num_finished`: those
        in the buffer."""
        if not self.auto:
            return
        self._until(now)
        self._began = {group_id: began for group_id, began in self._began.items() if group_id in running}  # others failed, or were given back
        seen, self._seen = self._seen, Seen()
        reached, self._reached = self._reached, False
        if not seen.tokens or not self._num_engines:
            return
        self._learn(seen)
        wanted = self._wanted(num_finished)
        if wanted > self.load and not reached:
            return  # something else holds groups back
        if abs(wanted / self.load - 1) > HYSTERESIS:
            self._set(min(max(wanted, self.load / PACE), self.load * PACE))

    def _learn(self, seen: Seen) -> None:
        load, latency = seen.load_seconds / seen.seconds, seen.seconds / seen.tokens
        if len(self.levels) >= MIN_LEVELS:  # a delay of all that ran is no load: what lasts is learnt step by step
            line = line_through(self.levels.values())
            latency = min(latency, PACE * (line.alpha + line.beta * load))
        self.levels.setdefault(round(math.log(max(load, 1e-3), PACE)), Level()).add(load, latency)
        self._num_steps = min(MEMORY, self._num_steps + 1)
        self._taken_s += (seen.taken_s - self._taken_s) / self._num_steps
        self._tokens += (seen.tokens / seen.num_groups - self._tokens) / self._num_steps

    def _wanted(self, num_finished: int) -> float:
        if len(self.levels) < MIN_LEVELS:
            return self.load * PACE
        line = line_through(self.levels.values())
        saturating = line.load(SATURATED * line.rate(self._room / self._num_engines))
        if self._taken_s <= 0:
            return saturating
        more = 1 + GAIN * (BUFFER - num_finished / self._batch_groups)
        taken = self._batch_groups * self._tokens / self._taken_s / self._num_engines
        return min(saturating, line.load(max(0.0, more) * taken))

    def save(self) -> ConcurrencyState:
        """For a checkpoint."""
        return ConcurrencyState(self.load, {number: LevelState(level.load, level.latency, level.weight) for number, level in self.levels.items()})

    def restore(self, state: ConcurrencyState) -> None:
        """Go on from a checkpoint; the limit is set when engines are there."""
        if self.auto:
            self.load = state.load
            self.levels = {number: Level(level.load, level.latency, level.weight) for number, level in state.levels.items()}

"""The speed at which engines and trainer settle, between the bounds that staleness sets. Pure.

    groups in flight (eta, batch, concurrency) --> samples that run on each engine --> tokens/s generated --+
                                                                                                          smaller of both --> a step's time --> ages
    tokens of a batch ---------------------------------------------------> the trainer's time for a step --+

A decoding step of an engine with n samples takes `fixed_s + n * each_s`. Of a group in flight, so many samples run on average as its longest answer
leaves (Little's law); with eta = 0 all engines wait for the longest of a batch. Where both sides are about as fast, either waits for the other now
and then: the harmonic mean of order `EVEN` stands for that, as in virtual time with the real coordinator (benchmarks.scaling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from launcher.prediction.lengths import Lengths

EVEN = 9.0
ROUNDS = 60
GROUP_S, TOKEN_S = 1e-3, 7e-8
"""The coordinator's time for a finished group, and for each of its tokens (docs/scaling.md)."""


@dataclass(frozen=True)
class Engine:
    """One inference server: seconds of a decoding step are `fixed_s + n * each_s` with n of at most `slots` samples. `pause_s`: that a new version
    stops it; `prompt_s`: for a group's prompt."""

    fixed_s: float
    each_s: float
    slots: int
    pause_s: float
    prompt_s: float = 0.0

    def rate(self, running: float) -> float:
        """Tokens/s."""
        return running / (self.fixed_s + running * self.each_s) if running > 0 else 0.0

    def running(self, rate: float) -> float:
        """Samples with which it brings so many tokens/s; infinite where it never does, or any number does."""
        if not self.fixed_s or rate * self.each_s >= 1:
            return math.inf
        return rate * self.fixed_s / (1 - rate * self.each_s)

    def share_of(self, step_s: float) -> float:
        """The share of a training step in which it generates: new weights stop it once."""
        return 1 - min(0.9, self.pause_s / step_s)


@dataclass(frozen=True)
class Work:
    """What a training step takes: `batch` groups of `samples` answers; `kept`: the share of what is generated that is trained on. `concurrency`:
    groups in flight at most (None: as many as engines can use)."""

    eta: int
    batch: int
    samples: int
    lengths: Lengths
    concurrency: int | None
    kept: float = 1.0

    @property
    def tokens(self) -> float:
        """Of a step, those of answers."""
        return self.batch * self.samples * self.lengths.mean

    @cached_property
    def alive(self) -> float:
        """Samples of a group in flight that still run, on average."""
        return self.samples * self.lengths.mean / self.lengths.longest(self.samples)


@dataclass(frozen=True)
class Prediction:
    """In the steady state. `tokens_per_s`: trained on; `running`: samples on an engine; `slots_used`, `trainer_waits`: shares; `age`: mean, in steps;
    `limit`: what more of would bring most: engines, trainer, staleness, concurrency, coordinator."""

    tokens_per_s: float
    step_s: float
    running: float
    slots_used: float
    age: float
    trainer_waits: float
    limit: str


def predict(engine: Engine, num_engines: int, work: Work, train_s: float) -> Prediction:
    """`train_s`: of a step, with the copying of new weights."""
    if work.eta == 0:
        return _in_turn(engine, num_engines, work, train_s)
    speed, running = work.tokens / train_s, 0.0
    for _ in range(ROUNDS):
        step_s = work.tokens / speed
        running = min(engine.slots, _in_flight(work, train_s / step_s) * work.alive / num_engines)
        generated = num_engines * _of_answers(engine, work, running) * engine.share_of(step_s) * work.kept
        both = (generated**-EVEN + (work.tokens / train_s) ** -EVEN) ** (-1 / EVEN)
        speed += (min(both, _coordinated(work)) - speed) / 2
    step_s = work.tokens / speed
    busy = train_s / step_s
    limit = _limit(engine, work, running, busy, speed)
    running = min(running, engine.running(speed / (num_engines * work.kept * engine.share_of(step_s))))  # more would be for nothing
    groups = running * num_engines / work.alive
    held_back = work.eta - 0.5 if busy > 0.95 and work.concurrency is not None else groups / work.batch + 0.5
    return Prediction(speed, step_s, running, running / engine.slots, max(0.0, min(held_back, work.eta)), max(0.0, 1 - busy), limit)


def _in_turn(engine: Engine, num_engines: int, work: Work, train_s: float) -> Prediction:
    """eta = 0: all of a batch is generated, then trained on. While the answers that began together end, a decoding step gets faster."""
    samples = work.batch * work.samples / num_engines
    at_once = min(samples, engine.slots, (work.concurrency or work.batch) * work.samples / num_engines)
    queued_s = (samples - at_once) * work.lengths.mean / engine.rate(at_once)
    longest = work.lengths.longest(round(at_once * num_engines))
    last_s = engine.fixed_s * longest + engine.each_s * at_once * work.lengths.mean + work.batch / num_engines * engine.prompt_s
    step_s = (queued_s + last_s) / work.kept + engine.pause_s + train_s
    slots = samples * work.lengths.mean * (engine.fixed_s / max(1.0, at_once) + engine.each_s) / step_s
    return Prediction(work.tokens / step_s, step_s, at_once, min(1.0, slots * at_once / engine.slots), 0.0, 1 - train_s / step_s, "staleness")


def _in_flight(work: Work, busy: float) -> float:
    """Groups that run: admitted are (eta + 1) batches past the one that was trained on last (arXiv 2505.24298, Equation 3), of which one is in
    training for the share `busy` of the time, and half of one waits for the rest of its batch."""
    admitted = (work.eta + 1 - busy - 0.5) * work.batch
    return min(admitted, work.concurrency if work.concurrency is not None else admitted)


def _of_answers(engine: Engine, work: Work, running: float) -> float:
    """Tokens/s of one engine, with the time that its prompts take."""
    rate = engine.rate(running)
    return rate / (1 + rate * engine.prompt_s / (work.samples * work.lengths.mean))


def _coordinated(work: Work) -> float:
    """Tokens/s at which one coordinator has no time for more."""
    tokens = work.samples * work.lengths.mean
    return tokens / (GROUP_S + TOKEN_S * tokens)


def _limit(engine: Engine, work: Work, running: float, busy: float, speed: float) -> str:
    if speed > 0.9 * _coordinated(work):
        return "coordinator"
    if busy > 0.9:
        return "trainer"
    if running >= 0.95 * engine.slots:
        return "engines"
    return "concurrency" if work.concurrency is not None and work.concurrency <= (work.eta + 0.5 - busy) * work.batch else "staleness"

"""What benchmarks.bounds models: lengths of answers, and engines that decode samples side by side.

An engine that decodes n samples makes `peak * n / (n + half)` tokens/s: the time of a decoding step is linear in n, as measured (docs/staleness.md).
New weights stop all of it for `pause_s`; running samples go on with them, so that a token has the version that sampled it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.parts import Group, Lease

EPOCH = 1
MEAN_TOKENS, MAX_TOKENS = 64, 1024
Draw = Callable[[np.random.Generator, int], np.ndarray]


def _short(draw: np.random.Generator, number: int) -> np.ndarray:
    return draw.integers(32, 97, number)


def _lognormal(mean: float) -> Draw:
    return lambda draw, number: draw.lognormal(math.log(mean) - 0.32, 0.8, number)


def _long_tail(draw: np.random.Generator, number: int) -> np.ndarray:
    return draw.integers(27, 82, number) * np.where(draw.random(number) < 0.02, 10, 1)


LENGTHS: dict[str, Draw] = {"short": _short, "lognormal": _lognormal(MEAN_TOKENS), "long tail": _long_tail}
"""Answers of 64 tokens on average: 32 to 96; lognormal with a sigma of 0.8; 27 to 81, of which 2% are ten times as long."""


def drawn(name: str) -> Draw:
    """Lengths by their name in `LENGTHS`, or `lognormal:MEAN`, with the same sigma."""
    return LENGTHS[name] if name in LENGTHS else _lognormal(float(name.removeprefix("lognormal:")))


@dataclass(frozen=True)
class Fleet:
    """The engines, each with `slots` samples at once, and the trainer. `balance`: the trainer's tokens/s over those of all engines with all slots
    in use. An engine is lost every `between_s`, on average, and there again after
    `repair_s`. `peak`, `half` and `pause_s` are those of the embedded engine with a model of 7 million parameters."""

    num_engines: int = 4
    slots: int = 32
    peak: float = 4900.0
    half: float = 55.0
    pause_s: float = 0.02
    balance: float = 1.0
    between_s: float = math.inf
    repair_s: float = 600.0

    def rate(self, num_running: float) -> float:
        """Tokens/s of one engine that decodes so many samples."""
        return self.peak * num_running / (num_running + self.half)

    @property
    def trained_rate(self) -> float:
        """The trainer's tokens/s."""
        return self.balance * self.num_engines * self.rate(self.slots)

    @property
    def ideal_rate(self) -> float:
        """Tokens/s where neither ever waits for the other."""
        return min(self.trained_rate, self.num_engines * self.rate(self.slots))


class Faults:
    """When engines are lost, and come again. `at`: the next of either, in virtual seconds; infinite where nothing fails."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._draw, self._back = fleet, np.random.default_rng((seed, 1)), deque[float]()
        self._next = self._after(0.0, fleet.num_engines)

    @property
    def at(self) -> float:
        """The time."""
        return min(self._next, self._back[0] if self._back else math.inf)

    def take(self, now: float, num_engines: int) -> int:
        """What happens now with so many engines there: one is lost (-1), or there again (1)."""
        if self._back and self._back[0] <= now:
            self._back.popleft()
            return 1
        self._back.append(now + self._fleet.repair_s)
        self._next = self._after(now, max(1, num_engines - 1))
        return -1

    def _after(self, now: float, num_engines: int) -> float:
        return now + (self._draw.exponential(self._fleet.between_s / num_engines) if self._fleet.between_s < math.inf else math.inf)


@dataclass
class Work:
    """A lease: the lengths of its samples, and where each begins on its engine's scale of tokens."""

    lease: Lease
    lengths: list[int]
    begins: list[float] = field(default_factory=list)
    num_left: int = 0


class Engine:
    """Samples that are decoded side by side: each has the same speed, so one scale, `tokens` a sample, says for all of them when they end."""

    def __init__(self, peer: bytes, fleet: Fleet, now: float) -> None:
        self.peer, self.fleet, self.now = peer, fleet, now
        self.tokens, self.paused_until = 0.0, 0.0
        self.held: list[tuple[float, int]] = []  # the tokens a sample at which each version was loaded
        self.works: dict[str, Work] = {}
        self.idle_s = self.slot_s = 0.0
        self.told = 0
        self._running: list[tuple[float, int, Work]] = []
        self._waiting: deque[tuple[Work, int]] = deque()
        self._count = itertools.count()

    @property
    def num_live(self) -> int:
        """Samples that run, or wait for a slot."""
        return len(self._running) + len(self._waiting)

    @property
    def capacity(self) -> int:
        """Samples that it takes, as a real worker's engines do (rollout/engines/engine_pool.py)."""
        return self.fleet.slots * 3 // 2

    def advance(self, now: float) -> None:
        """Decode until `now`."""
        start, running = max(self.now, self.paused_until), len(self._running)
        if now > start and running:
            self.tokens += (now - start) * self.fleet.rate(running) / running
        self.idle_s += (now - self.now) * (not running)
        self.slot_s += (now - self.now) * running
        self.now = now

    @property
    def next_end(self) -> float:
        """When the next sample ends, if nothing happens before."""
        if not self._running:
            return math.inf
        running = len(self._running)
        return max(self.now, self.paused_until) + max(0.0, self._running[0][0] - self.tokens) * running / self.fleet.rate(running)

    def start(self, work: Work) -> None:
        """Take a lease."""
        self.works[work.lease.group_id] = work
        work.num_left = len(work.lengths)
        self._waiting.extend((work, length) for length in work.lengths)
        self._fill()

    def end_sample(self) -> Work | None:
        """The next sample ends, now; its lease's work if that was the last one."""
        self.tokens, _, work = heapq.heappop(self._running)
        work.num_left -= 1
        self._fill()
        return None if work.num_left else self.works.pop(work.lease.group_id)

    def load(self, step: int) -> None:
        """New weights."""
        self.held.append((self.tokens, step))
        self.paused_until = self.now + self.fleet.pause_s

    @property
    def begun(self) -> float:
        """Tokens of all samples whose groups have not ended: what is lost with it."""
        return sum(max(0.0, min(length, self.tokens - begin)) for work in self.works.values()
                   for begin, length in zip(work.begins, work.lengths, strict=False))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self.fleet.slots:
            work, length = self._waiting.popleft()
            work.begins.append(self.tokens)
            heapq.heappush(self._running, (self.tokens + length, next(self._count), work))

    def runs(self, begin: float, length: int) -> list[tuple[int, int]]:
        """How many of a sample's tokens each version sampled: (step, number)."""
        inside = [(max(0, math.ceil(at - begin)), step) for at, step in self.held if at < begin + length]
        starts = [(at, step) for at, step in inside if at == 0][-1:] + [(at, step) for at, step in inside if 0 < at < length]
        ends = [at for at, _ in starts[1:]] + [length]
        return [(step, end - at) for (at, step), end in zip(starts, ends, strict=True) if end > at]

    def group(self, work: Work) -> Group:
        """What is sent of a lease that has been worked off."""
        runs = [run for begin, length in zip(work.begins, work.lengths, strict=True) for run in self.runs(begin, length)]
        total, ones = sum(work.lengths), np.ones(len(work.lengths), np.float32)
        return Group(
            group_id=work.lease.group_id, attempt=work.lease.attempt, purpose=work.lease.purpose, prompt_id=work.lease.prompt_id,
            prompt=Int32.of([1]), lengths=Int32.of(work.lengths), tokens=Int32.of(np.zeros(total, np.int32)),
            logprobs=Float32.of(np.zeros(total, np.float32)), loss_mask=Bool.of(np.ones(total, bool)), rewards=Float32.of(ones),
            scores=Float32.of(ones), epochs=Int32.of([EPOCH] * len(runs)), steps=Int32.of([step for step, _ in runs]),
            run_lengths=Int32.of([number for _, number in runs]))

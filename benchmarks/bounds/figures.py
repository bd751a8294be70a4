"""What a simulated run comes to: its speed, how old its tokens were, and who waited."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from benchmarks.bounds.simulation import Setting, Simulation


@dataclass(frozen=True)
class Ages:
    """Ages at consumption, in training steps; `over`: the share above eta."""

    mean: float
    p99: int
    most: int
    over: float

    @staticmethod
    def of(counts: Counter[int], eta: int) -> Ages:
        """From how often each age was seen."""
        total, seen = sum(counts.values()), 0
        for p99 in sorted(counts):
            seen += counts[p99]
            if seen >= 0.99 * total:
                break
        return Ages(round(sum(age * count for age, count in counts.items()) / total, 3), p99, max(counts),
                    round(sum(count for age, count in counts.items() if age > eta) / total, 4))

    def __str__(self) -> str:
        return f"{self.mean:5.2f} {self.p99:3d} {self.most:3d} {self.over:5.1%}"


@dataclass(frozen=True)
class Figures:
    """Of one simulated run. `speed` is relative to the ideal; the rest are shares of the time, and of the slots; `concurrency`: the mean limit;
    `away`: of the engines' time, in which they were lost and not there again; `lost`: tokens that were lost with them, over those trained on."""

    speed: float
    head: Ages
    token: Ages
    wait: float
    idle: float
    slots: float
    concurrency: float
    away: float = 0.0
    lost: float = 0.0

    def __str__(self) -> str:
        return f"{self.speed:5.3f}   {self.head}   {self.token}   {self.wait:5.1%} {self.idle:5.1%} {self.slots:5.1%}"


HEADER = f"{'speed':>5}   {'head: mean p99 most over':<20}   {'token: mean p99 most':<20}   {'wait':>5} {'idle':>5} {'slots':>5}"


def simulate(setting: Setting) -> Figures:
    """Play one run and measure the steps that count."""
    return figures_of(Simulation(setting).run())


def figures_of(played: Simulation) -> Figures:
    """Of a run that was played to its end."""
    setting = played.setting
    seconds = played.step_ends[-1] - played.step_ends[setting.warm_up - 1]
    limits = played.concurrency[setting.warm_up:]
    heads = Counter(age for record in played.records for age in record.ages.head_ages)
    tokens = sum(record.ages.tokens_trained for record in played.records)
    return Figures(
        round(tokens / seconds / setting.fleet.ideal_rate, 4), Ages.of(heads, setting.eta), Ages.of(played.token_ages, setting.eta),
        round(played.wait_s / seconds, 4), round(played.idle_s / played.engine_s, 4),
        round(played.slot_s / played.engine_s / setting.fleet.slots, 4), round(sum(limits) / len(limits), 1),
        round(max(0.0, 1 - played.engine_s / seconds / setting.fleet.num_engines), 4), round(played.lost_tokens / tokens, 4))

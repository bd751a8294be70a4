"""The figures of past training steps that alarms are judged by. Pure.

    record of a step (a line of metrics.jsonl) --figures_of--> figures --History.add--> medians over the last `window` steps, the first, the best
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from workers.config import Config

MIN_COMPARED = 64
"""A mean gap of fewer tokens is not judged, as in the self-test: single tokens may lie far apart in half precision."""
MIN_REPLICAS = 2
"""A single rollout worker that is idle cannot be given to training."""
LONG = 20
"""So many windows are remembered at most."""
PLAIN = ("entropy", "behavior_ess", "behavior_weight_max", "behavior_masked_share", "share_no_spread", "share_rejected", "share_truncated",
         "response_tokens", "grad_norm", "loss", "refused")


class NotJudged(LookupError):
    """A figure that the last step does not have, or too few steps so far."""


def figures_of(record: Mapping[str, Any], before: Mapping[str, Any], config: Config) -> dict[str, float]:
    """The figures of the step of `record`; `before`: the record of the step before, or empty. What the record does not have, or what is not
    finite (null in metrics.jsonl), is left out."""
    sampled = record.get("accuracy_sampled")
    found = {name: record.get(name) for name in PLAIN} | {
        "accuracy": record.get("accuracy") if sampled is None else sampled,
        "logprob_gap": record.get("logprob_gap_mean") if (record.get("num_tokens_compared") or 0) >= MIN_COMPARED else None,
        "stale": _stale(record, config), "waiting": _waiting(record, config), "idle": _idle(record, before, config)}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)}


def _stale(record: Mapping[str, Any], config: Config) -> float | None:
    """The share of consumed groups that were older than staleness.eta."""
    counts = {int(age): count for age, count in (record.get("staleness_histogram") or {}).items()}
    return sum(count for age, count in counts.items() if age > config.staleness.eta) / sum(counts.values()) if counts else None


def _in_turns(record: Mapping[str, Any], config: Config) -> bool:
    """Whether generation and training must wait for each other: less than a step ahead, as with eta = 0, in its warm-up, or beyond a budget."""
    lead = record.get("lead")
    return config.staleness.eta == 0 or (record.get("step") or 0) <= config.staleness.warmup_steps or (lead is not None and lead < 1)


def _waiting(record: Mapping[str, Any], config: Config) -> float | None:
    """The share of the trainer's step in which it waited for the batch. None where it must: nothing is generated meanwhile."""
    waited, train, publish = (record.get(name) or 0.0 for name in ("wait_batch_s", "train_s", "publish_s"))
    return waited / (waited + train + publish) if not _in_turns(record, config) and train > 0 else None


def _idle(record: Mapping[str, Any], before: Mapping[str, Any], config: Config) -> float | None:
    """The share of the rollout workers' time without any lease, since the step before. None where workers have come or left."""
    keys = ("rollout_idle_s", "seconds", "replicas")
    if _in_turns(record, config) or any(entry.get(key) is None for entry in (record, before) for key in keys):
        return None
    idle, passed, replicas = record["rollout_idle_s"] - before["rollout_idle_s"], record["seconds"] - before["seconds"], record["replicas"]
    return idle / (passed * replicas) if replicas >= MIN_REPLICAS and replicas == before["replicas"] and idle >= 0 and passed > 0 else None


class History:
    """The series of each figure, over the steps that have it. All methods but `add` raise `NotJudged` where they cannot say."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._series: dict[str, deque[float]] = {}
        self._first: dict[str, float] = {}
        self._highest: dict[str, float] = {}
        self._lowest: dict[str, float] = {}
        self._last: frozenset[str] = frozenset()

    def add(self, figures: Mapping[str, float]) -> None:
        """Take the figures of one more step."""
        self._last = frozenset(figures)
        for name, value in figures.items():
            series = self._series.setdefault(name, deque(maxlen=LONG * self.window))
            series.append(value)
            if len(series) >= self.window:
                present = self.now(name)
                self._first.setdefault(name, present)
                self._highest[name] = max(self._highest.get(name, present), present)
                self._lowest[name] = min(self._lowest.get(name, present), present)

    def now(self, name: str) -> float:
        """The median of the last `window` steps."""
        return median(self._take(name, self.window))

    def earlier(self, name: str) -> float:
        """The median of the `window` steps before those."""
        return median(self._take(name, 2 * self.window)[: self.window])

    def first(self, name: str) -> float:
        """The median of the first `window` steps."""
        self.now(name)
        return self._first[name]

    def highest(self, name: str) -> float:
        """The highest median of `window` steps so far."""
        self.now(name)
        return self._highest[name]

    def lowest(self, name: str) -> float:
        """The lowest median of `window` steps so far."""
        self.now(name)
        return self._lowest[name]

    def upper(self, name: str) -> float:
        """What three in ten of the last `window` steps reach."""
        return sorted(self._take(name, self.window))[-max(1, round(0.3 * self.window))]

    def before(self, name: str) -> float:
        """The median of all that is remembered before the last `window` steps, which are `window` values at least and `LONG` windows at most."""
        self._take(name, 2 * self.window)
        return median(list(self._series[name])[: -self.window])

    def _take(self, name: str, number: int) -> list[float]:
        series = self._series.get(name, ())
        if name not in self._last or len(series) < number:
            raise NotJudged(name)
        return list(series)[-number:]

"""What is asked of the coordinator, and what is seen of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

EPOCH = 1


@dataclass(frozen=True)
class Load:
    """What the workers do. `rate`: groups a second of all of them together; `tokens`: of each of `samples` answers; `shares`: of a batch, one for
    each copy of the model."""

    workers: int = 64
    leases_each: int = 2
    rate: float = 30.0
    samples: int = 16
    tokens: int = 8000
    batch_groups: int = 64
    shares: int = 1

    @property
    def answer_s(self) -> float:
        """Seconds from a lease to its result."""
        return self.workers * self.leases_each / self.rate


@dataclass
class Seen:
    """Seconds from a result to its acknowledgement, to the lease that takes its place, from a heartbeat to its reply; results that were not
    accepted; steps."""

    acknowledged_s: list[float] = field(default_factory=list)
    leased_s: list[float] = field(default_factory=list)
    heartbeat_s: list[float] = field(default_factory=list)
    num_refused: int = 0
    num_steps: int = 0
    num_bytes: int = 0


def figures(seen: Seen, seconds: float) -> dict[str, Any]:
    """What was seen, in milliseconds and groups a second."""
    num_groups = len(seen.acknowledged_s)
    found: dict[str, Any] = {"groups": num_groups, "refused": seen.num_refused, "steps": seen.num_steps,
                             "groups_per_s": round(num_groups / seconds, 1), "megabytes_per_s": round(seen.num_bytes / seconds / 1e6, 1)}
    for name, times in (("acknowledged", seen.acknowledged_s), ("leased", seen.leased_s), ("heartbeat", seen.heartbeat_s)):
        for percent in (50, 99, 100):
            found[f"{name}_p{percent}_ms"] = round(1000 * float(np.percentile(times, percent)), 1) if times else None
    return found

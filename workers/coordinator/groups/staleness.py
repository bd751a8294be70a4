"""How far rollouts may run ahead of the trainer. Pure policy, counted in prompt groups.

B groups make a training step; version v is the number of completed steps; eta is the most steps to run ahead.

Admission (AReaL, arXiv 2505.24298, Eq. 3, in groups): a group may start iff

    admitted < (v + eta + 1) * B            where admitted counts groups running, finished or consumed.

A failed group gives its place back. eta = 0 is synchronous RL. This bounds how far rollouts run ahead, not the age of
a straggler when it is consumed. The mean age of what is consumed it does bound: whatever order groups are consumed in, their batches' numbers
add up to the same as in the order of admission, in which none is older than eta. So a `target` < eta in place of eta bounds that mean.
In the first `warmup_steps` steps, in which a policy moves fastest, what stands there for eta grows from 0. Besides, a `lead` (lead.py) that moves
between 0 and that, up and down, may stand there: as long as it is never above eta, everything here holds.

Hard: nothing consumed is older than eta, and nothing is dropped to get there. A group admitted at version a has the
deadline a + eta: batch i may take it only if i <= a + eta. Batch i takes finished groups by earliest deadline, and
only if afterwards, for every j >= i, the unconsumed groups (running ones too) with deadline <= j number at most
(j - i) * B. Else the trainer waits for a running group of an earlier deadline.

    Proof. U_i(j): unconsumed groups with deadline <= j before batch i. Invariant: U_i(j) <= (j - i + 1) * B for
    all j >= i. Batch i must take max_j (U_i(j) - (j - i) * B) <= B groups, so it can keep the invariant for i + 1.
    Groups admitted at version v <= i have deadline v + eta, and by the admission rule all unconsumed groups together
    number at most (v + eta + 1) * B - i * B, so admitting keeps it too; v < i where batches are formed before their version
    is there, and count as consumed for that. At j = i it says: whatever must go into batch i fits.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from workers.config import Bound
from workers.coordinator.groups.lead import Lead


class FinishedGroup(NamedTuple):
    """A finished, unconsumed group: its id, the version it was admitted at, and the order in which it finished."""

    group_id: str
    admitted_at: int
    order: int


@dataclass(frozen=True)
class StalenessPolicy:
    """The admission rule and the choice of batches, for one `eta`, batch size B and bound."""

    eta: int
    batch_groups: int
    bound: Bound
    target: float | None = None
    warmup_steps: int = 0
    lead: Lead | None = None

    def ahead(self, version: int) -> float:
        """How many steps rollouts may run ahead at `version`."""
        return self.furthest(version) if self.lead is None else min(self.lead.lead, self.furthest(version))

    def furthest(self, version: int) -> float:
        """The same, however far the lead is; never falls as `version` grows."""
        most = self.eta if self.target is None else min(self.target, self.eta)
        return most * version / self.warmup_steps if version < self.warmup_steps else most

    def may_admit(self, admitted: int, version: int) -> bool:
        """Whether one more group may start at `version` when `admitted` are running, finished or consumed."""
        return admitted < (version + self.ahead(version) + 1) * self.batch_groups

    def may_be(self, admitted: int, version: int) -> bool:
        """Whether so many may be admitted at `version`, now or since the lead was wider."""
        return admitted <= math.ceil((version + self.furthest(version) + 1) * self.batch_groups)

    def may_return(self, admitted: int, version: int, admitted_at: int, unconsumed: Mapping[int, int], next_batch: int) -> bool:
        """Whether a group that was given up for lost may be admitted once more, with what was generated since version `admitted_at`.

        It needs a place like any other, though not within the lead, which may have narrowed since: the work is done. Where ages are bounded
        (hard, or eta = 0), it must besides still be possible that all unconsumed groups (how many of each version) and this one meet their
        deadlines, with `next_batch` as the next batch.
        """
        if not self.may_be(admitted + 1, version):
            return False
        ages_are_bounded = self.bound is Bound.hard or self.eta == 0
        return not ages_are_bounded or self._feasible(next_batch - 1, Counter(unconsumed) + Counter([admitted_at]))

    def may_form(self, version: int, finished: Mapping[int, int], running: Mapping[int, int]) -> bool:
        """Whether the batch at `version` can be formed. `finished`, `running`: how many groups there are of each version they were admitted at."""
        if sum(finished.values()) < self.batch_groups:
            return False
        return self.bound is Bound.admission or self._feasible(version, Counter(self._left(finished)) + Counter(running))

    def choose(self, finished: Iterable[FinishedGroup]) -> list[str]:
        """The groups of a batch that may be formed: those that finished first; hard: those with the earliest deadlines."""
        order = (lambda group: group.order) if self.bound is Bound.admission else (lambda group: (group.admitted_at, group.order))
        return [group.group_id for group in heapq.nsmallest(self.batch_groups, finished, key=order)]

    def _left(self, finished: Mapping[int, int]) -> dict[int, int]:
        """What a batch of those with the earliest deadlines leaves."""
        left, taken = {}, 0
        for version in sorted(finished):
            take = min(finished[version], self.batch_groups - taken)
            taken += take
            left[version] = finished[version] - take
        return left

    def _feasible(self, version: int, rest: Mapping[int, int]) -> bool:
        # The k-th unconsumed group (from 0, by deadline) is consumed at best by batch version + 1 + k // B: it is enough to look at the last of each.
        count = 0
        for admitted_at in sorted(rest):
            count += rest[admitted_at]
            if version + 1 + (count - 1) // self.batch_groups > admitted_at + self.eta:
                return False
        return True

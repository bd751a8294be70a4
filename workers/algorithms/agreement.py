"""How far the engine's log-probs lie from the trainer's, where both are of the same weights: a sum over tokens, with statistics that add up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.algorithms.loss_statistics import Stats


def agreement(trainer: Tensor, engine: Tensor, compared: Tensor) -> Stats:
    """Sum and maximum of |`trainer` - `engine`|, log-probs [N], over the tokens where `compared`, bool [N], is set; for `merge_stats`."""
    gap = torch.where(compared, trainer - engine, 0.0).abs()
    return {"compared": compared.sum(), "gap": gap.sum(), "max_gap": torch.cat([gap, gap.new_zeros(1)]).max()}


@dataclass(frozen=True)
class Agreement:
    """The gap between the two, in nats, over `num_tokens` of a minibatch or step, which are the share `share` of its tokens."""

    num_tokens: int
    share: float
    mean: float
    max: float

    @staticmethod
    def of(totals: Mapping[str, float]) -> Agreement:
        """From merged statistics, which also have `tokens`."""
        compared = totals["compared"]
        return Agreement(int(compared), compared / max(totals["tokens"], 1.0), totals["gap"] / max(compared, 1.0), totals["max_gap"])

    def metrics(self) -> dict[str, float]:
        """`logprob_gap_mean` and `logprob_gap_max` are left out where nothing could be compared."""
        gaps = {"logprob_gap_mean": self.mean, "logprob_gap_max": self.max} if self.num_tokens else {}
        return {"num_tokens_compared": float(self.num_tokens), **gaps}

    def __str__(self) -> str:
        return f"{self.mean:.2g} nats on average over {self.num_tokens} tokens, {self.max:.2g} at most"

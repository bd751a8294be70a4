"""Batches of tokens as hypothesis draws them, as rows for the references and as flat tensors for the implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from workers.algorithms.policy_loss import Objective, TokenInputs
from workers.algorithms.ratios import Responses

GARBAGE = [0.0, math.nan, math.inf, -math.inf, 1e30, -1e30]
SPREADS = [0.0, 0.01, 0.3, 2.0]
MOST = 19.0  # nats by which two log-probs differ at most: above 20 the implementation bounds their ratio


@dataclass(frozen=True)
class Case:
    """S responses, one or more tokens each: rows of numbers. What stands where a mask is False is garbage."""

    masks: list[list[bool]]
    current: list[list[float]]
    proximal: list[list[float]]
    behavior: list[list[float]]
    reference: list[list[float]]
    entropy: list[list[float]]
    advantages: list[list[float]]
    kept: list[list[bool]]

    @property
    def lengths(self) -> list[int]:
        """Numbers of actions."""
        return [sum(mask) for mask in self.masks]

    def flat(self, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
        """A field, one response after the other: [N]."""
        return torch.tensor([value for row in getattr(self, name) for value in row], dtype=torch.bool if name in ("masks", "kept") else dtype)

    def responses(self, dtype: torch.dtype = torch.float64) -> Responses:
        index = torch.repeat_interleave(torch.arange(len(self.masks)), torch.tensor([len(mask) for mask in self.masks]))
        return Responses(index, torch.tensor(self.lengths, dtype=dtype))

    def inputs(self, dtype: torch.dtype = torch.float64) -> TokenInputs:
        """What the loss takes, with gradients of `current` and `entropy`."""
        return TokenInputs(
            self.flat("current", dtype).requires_grad_(), self.flat("proximal", dtype), self.flat("behavior", dtype), self.flat("advantages", dtype),
            self.flat("masks"), self.flat("reference", dtype), self.flat("entropy", dtype).requires_grad_(), self.flat("kept"), self.responses(dtype))


def rounded(values: np.ndarray) -> np.ndarray:
    """To float32 and back: the same number in both precisions."""
    return np.asarray(values, np.float32).astype(np.float64)


def draw_case(lengths: list[int], seed: int, spread: float, garbage: float, shared: bool) -> Case:
    """Log-probs that lie `spread` apart; advantages `shared` by the tokens of a response, or one each; a third of the tokens masked."""
    rng = np.random.default_rng(seed)

    def rows(flat: np.ndarray, other: float) -> list[list[float]]:
        pieces = np.split(np.where(mask, rounded(flat), other), np.cumsum(lengths)[:-1])
        return [piece.tolist() for piece in pieces]

    number = sum(lengths)
    mask = rng.random(number) > 0.3
    base = -np.abs(rng.normal(1, 1, number)) - 0.01
    gaps = (np.clip(spread * rng.normal(size=number), -MOST / 2, MOST / 2) for _ in range(4))
    advantages = rng.normal(size=number) * (rng.random(number) > 0.1)
    if shared:
        advantages = np.repeat(rng.normal(size=len(lengths)), lengths)
    current, proximal, behavior, reference = (rows(base + gap, garbage) for gap in gaps)
    split = [piece.tolist() for piece in np.split(mask, np.cumsum(lengths)[:-1])]
    kept = [piece.tolist() for piece in np.split(rng.random(number) > 0.1, np.cumsum(lengths)[:-1])]
    return Case(split, current, proximal, behavior, reference, rows(rng.uniform(0, 4, number), garbage), rows(advantages, garbage), kept)


def cases(spreads: list[float] | None = None) -> st.SearchStrategy[Case]:
    return st.builds(draw_case, lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1),
                     spread=st.sampled_from(spreads or SPREADS), garbage=st.sampled_from(GARBAGE), shared=st.booleans())


def objectives(**fixed: Any) -> st.SearchStrategy[Objective]:
    """All that the loss can be put together from, with `fixed` choices."""
    choices: dict[str, st.SearchStrategy[Any]] = {
        "decoupled": st.booleans(), "ratio": st.sampled_from(["token", "sequence", "geometric"]),
        "surrogate": st.sampled_from(["clip", "cispo", "sapo", "none"]), "clip_low": st.sampled_from([0.1, 0.2]),
        "clip_high": st.sampled_from([0.2, 0.28]), "dual_clip": st.sampled_from([0.0, 3.0]), "tau_positive": st.sampled_from([1.0, 0.5]),
        "tau_negative": st.sampled_from([1.05, 2.0]), "weight_level": st.sampled_from(["token", "sequence", "geometric"]),
        "weight_low": st.sampled_from([0.0, 0.5]), "weight_high": st.sampled_from([1.5, 5.0, math.inf]), "clamp_weights": st.booleans(),
        "kl_weight": st.sampled_from([0.0, 0.1]), "kl_estimator": st.sampled_from(["k1", "k2", "k3"]),
        "entropy_weight": st.sampled_from([0.0, 0.01]), "aggregation": st.sampled_from(["token_mean", "sequence_mean", "fixed_length"])}
    return st.builds(Objective, **choices | {name: st.just(value) for name, value in fixed.items()})

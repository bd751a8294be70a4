"""Divergences, entropy and aggregation from the papers, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]
Masks = Sequence[Sequence[bool]]


def k1(current: float, reference: float) -> tuple[float, float]:
    """Schulman, "Approximating KL divergence" (2020): -log r, r = pi_ref / pi, an estimate of KL(pi, pi_ref) on tokens of pi. Value and derivative
    with respect to log pi."""
    return current - reference, 1.0


def k2(current: float, reference: float) -> tuple[float, float]:
    """Schulman (2020): (log r)^2 / 2. Value and derivative with respect to log pi."""
    return (reference - current) ** 2 / 2, current - reference


def k3(current: float, reference: float) -> tuple[float, float]:
    """Schulman (2020): (r - 1) - log r; as in GRPO (arXiv 2402.03300), Eq. 4. Value and derivative with respect to log pi, 1 - r."""
    gap = reference - current
    return math.expm1(gap) - gap, -math.expm1(gap)


def entropy(logits: Sequence[float]) -> float:
    """- sum of p log p, p = softmax(logits) (PPO, arXiv 1707.06347, Eq. 9: the bonus S)."""
    top = max(logits)
    total = math.log(math.fsum(math.exp(value - top) for value in logits)) + top
    return -math.fsum(math.exp(value - total) * (value - total) for value in logits if value - total > -745)


def token_mean(values: Rows, masks: Masks) -> float:
    """DAPO (arXiv 2503.14476), Eq. 8: 1 / (sum of |o_i|), each token of the batch alike."""
    actions = [value for row, mask in zip(values, masks, strict=True) for value, used in zip(row, mask, strict=True) if used]
    return math.fsum(actions) / len(actions)


def sequence_mean(values: Rows, masks: Masks) -> float:
    """GRPO (arXiv 2402.03300), Eq. 3: 1/G sum over i of 1/|o_i| sum over t, each response alike; one without actions adds nothing."""
    total = 0.0
    for row, mask in zip(values, masks, strict=True):
        actions = [value for value, used in zip(row, mask, strict=True) if used]
        total += math.fsum(actions) / len(actions) if actions else 0.0
    return total / len(masks)


def fixed_length(values: Rows, masks: Masks, length: int) -> float:
    """Dr. GRPO (arXiv 2503.20783), Listing 1: the sum over tokens divided by a constant, the most that are allowed; its mean over the responses."""
    actions = [value for row, mask in zip(values, masks, strict=True) for value, used in zip(row, mask, strict=True) if used]
    return math.fsum(actions) / (length * len(masks))

"""Estimates of KL(pi, pi_ref) from sampled tokens (Schulman, "Approximating KL divergence", 2020)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from workers.algorithms.ratios import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def divergence(estimator: Estimator, current: Tensor, reference: Tensor) -> Tensor:
    """Of each token [N], from log-probs [N]; the gradient is that of `current`. With l = log pi - log pi_ref:

        k1 = l        k2 = l^2 / 2        k3 = exp(-l) - 1 + l

    k1 is without bias and may be negative; k2's gradient is, without bias, that of the divergence; k3 is without bias and never negative (GRPO,
    arXiv 2402.03300, Eq. 4). A token with -l above `MAX_LOG_RATIO` has no gradient in k3.
    """
    log_ratio = current - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    inverse = (-log_ratio).clamp(max=MAX_LOG_RATIO)
    return inverse.expm1() - inverse

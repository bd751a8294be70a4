"""The correction for what an older policy has sampled: the behaviour weights w = pi_prox / pi_behav, and what is done with extreme ones."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.algorithms.ratios import MAX_LOG_RATIO, Level, Responses, log_ratio_at


def behavior_weights(proximal: Tensor, behavior: Tensor, level: Level = "token", responses: Responses | None = None) -> Tensor:
    """w of each token [N], from log-probs [N] that are equal where a token does not count; see `ratios.Level`. Without gradient.

    token: AReaL (arXiv 2505.24298, Eq. 5). sequence: the weight of the whole response, the one without bias (Precup et al., 2000). geometric: its
    length-th root, which with GSPO's ratio makes up GSPO's ratio to the behaviour policy.
    """
    return log_ratio_at(level, (proximal - behavior).detach(), responses).clamp(max=MAX_LOG_RATIO).exp()


def bounded(weights: Tensor, low: float, high: float, clamp: bool) -> tuple[Tensor, Tensor]:
    """`weights` [N] with those outside [low, high] set to 0, or, with `clamp`, to the nearer bound; and which ones these are, bool [N].

    Masked with low 0: AReaL's cap. With low > 0: IcePop (Ring-1T, arXiv 2510.18855; 0.5 and 5 there). Clamped: truncated importance
    sampling (Ionides, 2008; TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025).
    """
    outside = (weights > high) | (weights < low)
    return torch.where(outside, weights.clamp(low, high) if clamp else torch.zeros_like(weights), weights), outside


def trust_region_tokens(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Which tokens [N] a trust region is about: those that have moved already to where their advantages push, A > 0 and r > 1 or A < 0 and r < 1.

    Source: M2PO (arXiv 2510.01161), as in its authors' code.
    """
    return (log_ratio * advantages) > 0


def second_moment_cut(squares: Tensor, limit: float) -> float:
    """The bound c of M2PO's mask: the tokens whose squared log-ratio is above c are left out, the largest ones, as many as it takes to bring the mean
    of the rest to `limit` or below. inf where nothing is left out, 0 where everything is.

    `squares` floating point [M], (log pi_prox - log pi_behav)^2 of the `trust_region_tokens` of a whole training step, in any order: equal values are
    left out together. Source: M2PO (arXiv 2510.01161; its limit is 0.04).
    """
    ordered = squares.double().sort().values
    if not len(ordered) or float(ordered.mean()) <= limit:
        return float("inf")
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    whole = torch.cat([ordered[1:] != ordered[:-1], torch.ones(1, dtype=torch.bool)])  # the last of equal values
    kept = ((means <= limit) & whole).nonzero()
    return float(ordered[kept[-1, 0]]) if len(kept) else 0.0

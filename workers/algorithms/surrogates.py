"""What is maximised for a token, given the ratio u of the current to the proximal policy and the advantage A; and which tokens are clipped.

All take floating point [N] and return the objective [N], whose gradient passes `ratio` (`cispo`: `current`), and bool [N].
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0) -> tuple[Tensor, Tensor]:
    """min(u A, clip(u, 1 - low, 1 + high) A); with `dual` c > 1 and A < 0 not less than c A. True where it is not u A.

    Source: PPO (arXiv 1707.06347, Eq. 7); low and high apart: DAPO's clip-higher (arXiv 2503.14476, Eq. 10); dual clip (arXiv 1912.09729, Eq. 5).
    """
    plain = ratio * advantages
    bounded = ratio.clamp(1 - low, 1 + high) * advantages
    objective = torch.minimum(plain, bounded)
    if dual:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual * advantages), objective)
    return objective, objective.detach() != plain.detach()


def cispo(ratio: Tensor, current: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """sg[clip(u, 1 - low, 1 + high)] A log pi, `current` being log pi: the weight is clipped, and every token keeps its gradient. True where
    it is clipped. Source: CISPO (MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5); `low` 1 sets no lower bound, as there."""
    weight = ratio.detach()
    bounded = weight.clamp(1 - low, 1 + high)
    return bounded * advantages * current, bounded != weight


def sapo(ratio: Tensor, advantages: Tensor, tau_positive: float, tau_negative: float) -> tuple[Tensor, Tensor]:
    """4 / tau sigmoid(tau (u - 1)) A, with one tau where A > 0 and another elsewhere: a soft gate, of slope 1 at u = 1. Never true.

    Source: SAPO (arXiv 2511.20347, section 3).
    """
    tau = torch.where(advantages > 0, ratio.new_tensor(tau_positive), ratio.new_tensor(tau_negative))
    return 4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, torch.zeros_like(advantages, dtype=torch.bool)


def unclipped(ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """u A, the policy gradient with importance sampling. Never true."""
    return ratio * advantages, torch.zeros_like(advantages, dtype=torch.bool)

"""The proximal policy's log-probs without a forward pass of their own (A-3PO, arXiv 2512.06547)."""

from __future__ import annotations

import torch
from torch import Tensor


def loglinear_logprobs(current: Tensor, behavior: Tensor, versions: Tensor, proximal_version: int) -> Tensor:
    """log pi_prox ~ log pi_behav + alpha (log pi - log pi_behav), alpha = (v_prox - v_behav) / (v - v_behav), where v = v_prox + 1.

    `current` (its gradient is not followed) and `behavior` are floating point [N], `versions` integer [N]: the version that sampled each
    token; `proximal_version`: the one before the training step. A token of that version keeps its behaviour log-prob, and the older a token
    is, the nearer it comes to the current one. Later versions count as that one. As AReaL's `prox_logp_method=loglinear`.
    """
    age = (proximal_version - versions).clamp(min=0).to(behavior.dtype)
    return torch.lerp(behavior, current.detach().to(behavior.dtype), age / (age + 1))

"""From tokens to one loss: the sum over tokens of weight times value, divided by a number that is the same for the whole minibatch.

    token_mean      sum_i sum_t x / sum_i |o_i|           DAPO (arXiv 2503.14476, Eq. 8), AReaL
    sequence_mean   sum_i (1 / |o_i|) sum_t x / n         GRPO (arXiv 2402.03300, Eq. 3), GSPO
    fixed_length    sum_i sum_t x / (n L)                 Dr. GRPO (arXiv 2503.20783, section 3)

|o_i| are the tokens of response i that are trained on, n the responses that have any. All three are sums, so micro-batches and ranks add up.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from workers.algorithms.ratios import Responses

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]


def token_weights(aggregation: Aggregation, responses: Responses) -> Tensor:
    """What each token's value is multiplied by: [N], in the dtype of the responses' lengths."""
    lengths = responses.token_lengths()
    return 1 / lengths if aggregation == "sequence_mean" else torch.ones_like(lengths)


def normalizer(aggregation: Aggregation, num_tokens: int, num_responses: int, fixed_length: int) -> float:
    """What the sum is divided by, at least 1: of the trained tokens and of the responses that have any, in the whole minibatch."""
    match aggregation:
        case "token_mean":
            return float(max(1, num_tokens))
        case "sequence_mean":
            return float(max(1, num_responses))
        case "fixed_length":
            return float(max(1, num_responses * fixed_length))

"""A batch of responses in padded rows, as a textbook's training loop has it: a Hugging Face model, no packing, no shared prompts, one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.trainer.batch.group import TrainGroup

Rows = list[list[float]]


@dataclass(frozen=True)
class Padded:
    """S responses of T tokens at most, float32 [S, T] unless said otherwise; 0 where there is no action.

    `current` log-probs and `entropy` have a gradient; `mask` bool; `kept` bool: what M2PO keeps; `age`: how many versions older than the proximal
    policy's each token is.
    """

    current: Tensor
    entropy: Tensor
    proximal: Tensor
    behavior: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor
    kept: Tensor
    age: Tensor

    @property
    def lengths(self) -> Tensor:
        """|o_i|: [S]."""
        return self.mask.sum(1)


def rows_of(groups: list[TrainGroup], name: str) -> list[np.ndarray]:
    """A field of all responses, one array each."""
    return [row for group in groups for row in getattr(group, name)]


def pad(rows: Sequence[Any], mask: Tensor | None = None) -> Tensor:
    """Rows of unequal length, with zeros behind them and where `mask` is False: [S, T]."""
    width = max(len(row) for row in rows)
    filled = torch.stack([torch.nn.functional.pad(torch.as_tensor(np.asarray(row)), (0, width - len(row))) for row in rows])
    filled = filled if filled.dtype == torch.bool else filled.float()
    return filled if mask is None else torch.where(mask, filled, torch.zeros_like(filled))


def forward(model: Any, groups: list[TrainGroup], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of all response tokens and the entropies where they were chosen: two [S, T]."""
    pairs = [(group.prompt, response) for group in groups for response in group.responses]
    tokens = pad([np.concatenate(pair) for pair in pairs]).long()
    there = pad([np.ones(len(prompt) + len(response), np.bool_) for prompt, response in pairs])
    table = torch.log_softmax(model(tokens, attention_mask=there.long()).logits.float() / temperature, dim=-1)
    starts = torch.tensor([len(prompt) - 1 for prompt, _ in pairs])
    places = starts[:, None] + torch.arange(max(len(response) for _, response in pairs))
    real = pad([np.ones(len(response), np.bool_) for _, response in pairs])
    chosen = table.gather(1, places.clamp(max=tokens.shape[1] - 1)[..., None].expand(-1, -1, table.shape[-1]))
    logprobs = chosen.gather(2, pad([response for _, response in pairs]).long()[..., None])[..., 0]
    entropy = -(chosen.exp() * chosen).sum(-1)
    return torch.where(real, logprobs, 0.0), torch.where(real, entropy, 0.0)

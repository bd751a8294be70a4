"""The engine's choice of experts in the place of the router's own (R3, arXiv 2510.11370).

    PackedBatch.routing --this rank's tokens, this stage's layers--> get_replay_topk: the chosen experts' scores, of which their weights are made

Only which experts is replayed: how much each counts is the trainer's own router's, which learns by it as ever. Where a layer's activations are made
again in the backward pass, its micro-batches come back in the order in which they went, as token_dispatcher.py has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.model.architecture import Architecture
from workers.trainer.megatron.hf_conversion import pieces_of


class RouterReplay:
    """Of one router, the `place`-th of the whole model. It has what Megatron-core's router asks of its own class of this name, whose actions someone
    would have to switch between the forward and the backward pass of each micro-batch."""

    def __init__(self, place: int) -> None:
        self._place = place
        self._chosen: Tensor | None = None
        self._made_again: deque[Tensor | None] | None = None

    def begin(self, gradients: bool) -> None:
        """As `TokenDispatcher.begin`."""
        self._chosen, self._made_again = None, deque() if gradients else None

    def choose(self, chosen: Tensor | None) -> None:
        """For the next forward pass: integers [t, layers with experts, experts per token] of this rank's tokens; None: the router's own choice."""
        self._chosen = chosen

    def get_replay_topk(self, scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None,
                        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None) -> tuple[Tensor, Tensor]:
        """The scores, with gradient, and numbers (int64) of the experts of each token, [t, topk] each, for `scores` [t, experts]."""
        chosen = self._chosen
        if self._made_again and torch.is_grad_enabled():
            chosen = self._made_again.popleft()
        elif self._made_again is not None and not torch.is_grad_enabled():
            self._made_again.append(chosen)
        if chosen is None:
            assert default_compute_topk is not None
            return default_compute_topk(scores, topk, num_groups, group_topk)
        experts = chosen[:, self._place].long()
        return scores.gather(1, experts), experts


def install(model: Any, architecture: Architecture) -> None:
    """Have all routers of this rank's part of a model replay what they are told."""
    for layer in [layer for piece in pieces_of(model) for layer in piece.decoder.layers]:
        if architecture.has_experts(layer.layer_number - 1):
            layer.mlp.router.router_replay = RouterReplay(layer.layer_number - 1 - architecture.routing.num_dense)

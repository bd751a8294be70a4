"""Tokens on their way to their experts and back; the host waits once a layer and micro-batch.

    [tokens, hidden] --a row for each token and expert, sorted by expert--> [tokens * k, hidden]
        --all-to-all over the expert-parallel ranks--> (--all-gather over those that share an expert-->) --sorted by expert--> experts
    and the same way back, where a token's rows are added up.

The host must know how many rows go where, as NCCL's all-to-all takes its splits from there: it waits for the counts of all ranks, once.
Where a layer's activations are made again in the backward pass, the rows are those of the forward pass: nothing is counted, nor waited for, and
a tie that breaks otherwise sends no token elsewhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


@dataclass(frozen=True)
class _Rows:
    """Of a layer and a micro-batch. `chosen` int64 [n]: where in [tokens, k] this rank's rows stand, `tokens` [n] their tokens, `places` int64
    [tokens, k] the rows of each token; `per_expert` int64 [experts of this rank]: the rows that each computes. Where experts are on several ranks,
    `sent` and `received` are the rows for and from each, `gathered` those of each rank that shares an expert; `order` int64 [m] sorts by expert what
    arrives, `inverse` undoes it."""

    chosen: Tensor
    tokens: Tensor
    places: Tensor
    per_expert: Tensor
    sent: list[int] | None = None
    received: list[int] | None = None
    gathered: list[int] | None = None
    order: Tensor | None = None
    inverse: Tensor | None = None


class TokenDispatcher(MoEAlltoAllTokenDispatcher):
    """Takes the place of Megatron-core's all-to-all dispatcher, which waits three times in each pass through a layer."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "unused"  # else it makes one
        super().__init__(*arguments, **keywords)
        self.tokens_per_expert = None  # Megatron-core's methods hand it around
        self._rows: _Rows | None = None
        self._made_again: deque[_Rows] | None = None

    def begin(self, gradients: bool) -> None:
        """Before a minibatch's passes, and after: forget what was kept; `gradients`: whether activations may be made again."""
        self._rows, self._made_again = None, deque() if gradients else None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """`hidden_states` [.., hidden], of t tokens; `routing_map` int64, `probs` float [t, k]: the numbers of each token's experts and their weights
        (moe.py's routers). Returns rows and their weights."""
        self.hidden_shape = hidden_states.shape
        self._rows = self._rows_of(routing_map)
        self.input_splits, self.output_splits = self._rows.sent, self._rows.received  # of token_dispatch, which is Megatron-core's
        rows = _Gathered.apply(hidden_states.view(-1, self.hidden_shape[-1]), self._rows.tokens, self._rows.places)
        return rows, _Gathered.apply(probs.view(-1), self._rows.chosen, self._rows.places.view(-1))

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What has arrived, sorted by expert; how many rows each of them has; the rows' weights."""
        assert self._rows is not None
        if self.tp_size > 1:
            hidden_states, probs = (gather_from_sequence_parallel_region(each, group=self.tp_group, output_split_sizes=self._rows.gathered)
                                    for each in (hidden_states, probs))
        if self._rows.order is not None:
            hidden_states, probs = (_Gathered.apply(each, self._rows.order, self._rows.inverse) for each in (hidden_states, probs))
        return hidden_states, self._rows.per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows in the order in which they came, added up over the ranks that share an expert."""
        assert self._rows is not None
        if self._rows.order is not None:
            hidden_states = _Gathered.apply(hidden_states, self._rows.inverse, self._rows.order)
        if self.tp_size == 1:
            return hidden_states
        total = reduce_scatter_to_sequence_parallel_region(hidden_states.float(), group=self.tp_group, input_split_sizes=self._rows.gathered)
        return total.to(hidden_states.dtype)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Each token's rows, added up, in the shape of what was dispatched."""
        assert self._rows is not None
        return _Gathered.apply(permutated_local_input_tokens, self._rows.places, self._rows.tokens).view(self.hidden_shape)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
        return tokens_per_expert  # the host has what it needs

    def _own_counts(self, experts: Tensor) -> Tensor:
        """How many rows this rank has for each expert, int64 [experts]."""
        return experts.new_zeros(self.num_experts).scatter_add_(0, experts, torch.ones_like(experts))

    def count_rows(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """How many rows each rank has for each expert, int64 [ranks, experts], on the device and on the host, which waits for it; `experts` [n] are
        those of this rank's."""
        own = self._own_counts(experts)
        of_all = own.new_empty(self.tp_ep_group.size() * self.num_experts)
        dist.all_gather_into_tensor(of_all, own, group=self.tp_ep_group)
        of_all = of_all.view(-1, self.num_experts)
        return of_all, of_all.cpu()

    def _rows_of(self, experts: Tensor) -> _Rows:
        if self._made_again and torch.is_grad_enabled():
            return self._made_again.popleft()  # micro-batches come back in the order in which they went
        rows = self._new_rows(experts)
        if self._made_again is not None and not torch.is_grad_enabled():
            self._made_again.append(rows)
        return rows

    def _new_rows(self, experts: Tensor) -> _Rows:
        each, experts, num_local = experts.shape[1], experts.reshape(-1), self.num_local_experts
        chosen = experts.argsort(stable=True)
        tokens, places = chosen // each, chosen.argsort().view(-1, each)
        if self.tp_ep_group.size() == 1:
            return _Rows(chosen, tokens, places, self._own_counts(experts))
        on_device, on_host = self.count_rows(experts)
        mine = slice(self.local_expert_indices[0], self.local_expert_indices[0] + num_local)
        # [ranks that share an expert, expert-parallel ranks, experts of this rank]: the order in which rows arrive.
        here, told = (counts.view(self.ep_size, self.tp_size, -1)[:, :, mine].transpose(0, 1) for counts in (on_device, on_host))
        sent = on_host[self.tp_ep_group.rank()].view(self.ep_size, -1).sum(1)
        order = (torch.repeat_interleave(here.reshape(-1), output_size=int(told.sum())) % num_local).argsort(stable=True)
        return _Rows(chosen, tokens, places, here.sum((0, 1)), sent.tolist(), told[self.tp_rank].sum(1).tolist(), told.sum((1, 2)).tolist(),
                     order, order.argsort())


class _Gathered(torch.autograd.Function):
    """Rows of x at `there`, and of the gradient at `back`, which undoes it: int64 [n], or [t, k] for rows that are added up, always in that order,
    which index_add on GPUs does not keep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return _gather(x, there)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gather(grad, ctx.saved_tensors[0]), None, None


def _gather(x: Tensor, places: Tensor) -> Tensor:
    return x.index_select(0, places) if places.dim() == 1 else x[places].sum(1)

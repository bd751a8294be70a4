"""One rank of a gang that shares the experts of a mixture: python -m tests.wire.ranks.experts_rank FOLDER RANK WORLD PORT.

Dealing tokens out, the experts and the way back, with routings of every kind, against each expert's formula, token by token.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors.torch import load_file
from torch import Tensor

from tests.support.megatron_case import config
from workers.config import ParallelConfig
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.model.token_dispatcher import TokenDispatcher
from workers.trainer.megatron.parallel import cpu_backend
from workers.trainer.megatron.parallel.gang import Gang

NUM_EXPERTS, HIDDEN = 4, 32
ROUTINGS = ("any", "the first two only", "the last one always", "the same for all")


def routed(kind: str, tokens: int, generator: torch.Generator) -> Tensor:
    """The experts of each token, int64 [tokens, 2]."""
    order = torch.rand(tokens, NUM_EXPERTS, generator=generator)
    order[:, :2] += 2.0 * (kind == "the first two only")
    order[:, -1] += 2.0 * (kind == "the last one always")
    order = order[:1].expand(tokens, -1) if kind == "the same for all" else order
    return order.topk(2).indices


def formula(x: Tensor, weights: Tensor, matrices: list[list[Tensor]]) -> Tensor:
    """The sum of gate, up and down projections of all experts, as `weights` [tokens, experts] says."""
    outputs = [functional.linear(functional.silu(functional.linear(x, gate)) * functional.linear(x, up), down) for gate, up, down in matrices]
    return (torch.stack(outputs, dim=1) * weights[:, :, None]).sum(1)


def dense(weights: Tensor, experts: Tensor) -> Tensor:
    """`weights` [tokens, 2] of `experts`, as [tokens, experts]."""
    return torch.zeros(len(weights), NUM_EXPERTS).scatter(1, experts, weights)


def through(layer: Any, x: Tensor, routing: Tensor, weights: Tensor) -> Tensor:
    """`x` [tokens, hidden] as Megatron-core's MoELayer passes it."""
    rows, row_weights = layer.token_dispatcher.dispatch_preprocess(x, routing, weights)
    output, _ = layer.routed_experts_compute(*layer.token_dispatcher.token_dispatch(rows, row_weights))
    return layer.token_dispatcher.combine_postprocess(layer.token_dispatcher.token_combine(output))


def close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())))


def check(layer: Any, matrices: list[list[Tensor]], rank: int, world: int, kind: str, made_again: bool) -> None:
    """All ranks' tokens are known to each; a rank passes its own, and has the gradients of its experts from all of them."""
    generator = torch.Generator().manual_seed(ROUTINGS.index(kind))
    batches = []
    for number in range(world):
        x, weights, gradient = (torch.randn(7 + 6 * number, size, generator=generator) for size in (HIDDEN, 2, HIDDEN))
        batches.append((x.requires_grad_(), routed(kind, len(x), generator), weights.requires_grad_(), gradient))
    of_all = [parameter for expert in matrices for parameter in expert]
    expected = [formula(x, dense(weights, routing), matrices) for x, routing, weights, _ in batches]
    grads = torch.autograd.grad(expected, [*of_all, batches[rank][0], batches[rank][2]], [gradient for *_, gradient in batches])
    x, routing, weights, gradient = batches[rank]
    layer.token_dispatcher.begin(gradients=made_again)
    if made_again:  # the rows are those of the first pass, whatever the router says in the second
        with torch.no_grad():
            assert close(through(layer, x, routing, weights), expected[rank])
        routing = (routing + 1) % NUM_EXPERTS
    output = through(layer, x, routing, weights)
    for parameter in layer.experts.parameters():
        parameter.main_grad.zero_()
    of_x, of_weights = torch.autograd.grad(output, [x, weights], gradient)
    assert close(output, expected[rank]) and close(of_x, grads[-2]) and close(of_weights, grads[-1]), (kind, made_again)
    own = NUM_EXPERTS // world
    for number, expert in enumerate(layer.experts.local_experts):
        gate, up, down = grads[3 * (own * rank + number):][:3]
        found = expert.linear_fc1.weight.main_grad, expert.linear_fc2.weight.main_grad
        assert close(found[0], torch.cat([gate, up])) and close(found[1], down), (kind, made_again, number)


def main() -> None:
    folder, rank, world, port = Path(sys.argv[1]), *map(int, sys.argv[2:])
    gang = Gang(rank, world, local_rank=rank, master_addr="127.0.0.1", master_port=port, interface="lo")
    engine = MegatronEngine(config(parallel=ParallelConfig(ep=world)), folder / "qwen3moe", gang)
    layer = engine._policy.trained.model.decoder.layers[0].mlp
    stored = load_file(folder / "qwen3moe" / "model.safetensors")
    matrices = [[stored[f"model.layers.0.mlp.experts.{number}.{part}_proj.weight"].requires_grad_() for part in ("gate", "up", "down")]
                for number in range(NUM_EXPERTS)]
    real, counted = TokenDispatcher.count_rows, []
    TokenDispatcher.count_rows = lambda self, routing: counted.append(0) or real(self, routing)  # type: ignore[method-assign,func-returns-value]
    with cpu_backend.redirected():
        for kind in ROUTINGS:
            for made_again in (False, True):
                check(layer, matrices, rank, world, kind, made_again)
    assert len(counted) == (2 * len(ROUTINGS) if world > 1 else 0), "once for both passes, and not at all where all experts are here"


if __name__ == "__main__":
    main()

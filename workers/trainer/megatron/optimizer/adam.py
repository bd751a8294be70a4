"""AdamW with one step count per parameter group, the state layout of apex's and Transformer Engine's FusedAdam.

Megatron-core's distributed optimizer saves and loads that layout; torch.optim.AdamW keeps a step per parameter, which
its loading code does not handle.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.adamw import adamw


class GroupStepAdamW(torch.optim.Optimizer):
    """Decoupled weight decay (arXiv 1711.05101), torch's fused kernel: one pass over the memory, on CPU as well."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("adam_w_mode=False: only decoupled weight decay is implemented. Set decoupled_weight_decay=True")
        if capturable:
            raise ValueError("capturable=True: a CUDA graph cannot hold this step, which counts on the host. Set optimizer_cuda_graph=False")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient; `param_groups[i]["step"]` counts the updates."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            for param in params:
                if not self.state[param]:
                    self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
            done = group.get("step", 0)
            # The kernel counts in one scalar tensor per parameter; these are views of a throw-away vector.
            counts = list(torch.full((len(params),), float(done), device=params[0].device).unbind())
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                counts,
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            group["step"] = done + 1

"""Bias and noise of each objective's gradient against the exact one, by how far the behaviour policy lies from the one in training.

    a table after some training (proximal and current policy) <--s of the way back to its start--> behaviour policies, each of a given divergence
    many batches of one behaviour policy --the objective's gradient of each--> their mean against the gradient of success, and their scatter

Biased is a mean that points elsewhere: objectives have scales of their own (advantages are normalised), so the angle is what counts. Noisy is a
scatter that is large against the mean: `batches` is how many it takes until both are as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.tabular.objectives import Batch, Method
from benchmarks.tabular.objectives import method as method_of
from benchmarks.tabular.policy import Task, success
from benchmarks.tabular.study import Setting, answers, of, trained

REPEATS = 256
HALVINGS = 30


@dataclass(frozen=True)
class Gradient:
    """At a divergence of `gap` nats a token: the cosine between mean and exact gradient, and batches until scatter and mean are as long."""

    gap: float
    cosine: float
    batches: float


def measure(methods: list[Method], gaps: list[float], setting: Setting, steps: int = 100) -> dict[str, list[Gradient]]:
    """Of each method at each divergence, for a table that was trained on fresh samples for so many steps."""
    task, reference = Task.draw(setting.prompts, setting.length, setting.right), method_of("decoupled_ppo")
    assert isinstance(reference, Method)
    first, now = trained(reference, setting, steps)
    exact = torch.autograd.grad(success(at := now.clone().requires_grad_(), task).sum(), at)[0].flatten()
    found: dict[str, list[Gradient]] = {method.name: [] for method in methods}
    for gap in gaps:
        behavior = now + _way_back(now, first, gap) * (first - now)
        for method in methods:
            each = _gradients(method, behavior, now, first, task, setting)
            mean = each.mean(0)
            noise = float((each - mean).square().sum(-1).mean())
            found[method.name].append(Gradient(gap, float(torch.cosine_similarity(mean, -exact, dim=0)), noise / float(mean.square().sum())))
    return found


def apart(now: Tensor, behavior: Tensor, setting: Setting, generator: torch.Generator) -> float:
    """Nats a token between two tables, on answers of the second."""
    prompts = torch.randint(setting.prompts, (1, 512), generator=generator)
    tokens, rows = answers(behavior, prompts, setting.samples, generator)
    return float((of(now, prompts, tokens, rows) - of(behavior, prompts, tokens, rows)).abs().mean())


def _way_back(now: Tensor, first: Tensor, gap: float) -> float:
    """The share of the way from `now` to `first`, or past it, at which policies are `gap` apart."""
    low, high = 0.0, 4.0
    for _ in range(HALVINGS if gap else 0):
        middle = (low + high) / 2
        seen = apart(now, now + middle * (first - now), Setting(0, 0.0), torch.Generator().manual_seed(2))
        low, high = (middle, high) if seen < gap else (low, middle)
    return low


def _gradients(method: Method, behavior: Tensor, now: Tensor, first: Tensor, task: Task, setting: Setting) -> Tensor:
    """Of many batches, the gradient of each: [repeats, numbers of the table]."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.arange(setting.groups).remainder(setting.prompts).expand(REPEATS, -1)  # all of them, so that only answers are chance
    old, table = behavior.expand(REPEATS, -1, -1, -1), now.expand(REPEATS, -1, -1, -1).clone().requires_grad_()
    tokens, rows = answers(old, prompts, setting.samples, generator)
    rewards = task.rewards(prompts[..., None].expand(*tokens.shape[:-1]), tokens)
    centre, start = of(now.expand_as(old), prompts, tokens, rows), of(first.expand_as(old), prompts, tokens, rows)
    batch = method.prepared(Batch(of(old, prompts, tokens, rows), centre, start, method.estimate(rewards), torch.zeros_like(prompts)))
    method.loss(of(table, prompts, tokens, rows), batch, 1).backward()
    assert table.grad is not None
    return table.grad.flatten(1)

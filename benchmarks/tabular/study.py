"""Trains tables from old samples, and watches success and divergence.

    version v - lag, as engines have it --sample--> answers --right?--> rewards --> advantages --loss, two minibatches--> Adam --> version v + 1
                                   |
                                   +-- how far: |log pi_prox - log pi_behav|, nats a token, and the effective sample size of the weights

The lag is `eta` versions for every group, or drawn for each: lognormal around it, as groups of unequal length have it in a fleet, at most 4 eta.
An engine that computes otherwise than the trainer (`mismatch`) has every version's logits off by noise, which stays the same for that version.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.tabular.objectives import Batch, Method
from benchmarks.tabular.policy import Task, logprobs, sample, start, success

SIGMA, LONGEST = 0.8, 4
MINIBATCHES = 2


@dataclass(frozen=True)
class Setting:
    """One case. `spread`: whether the lag is drawn for each group. `mismatch`: standard deviation of the logits between engine and trainer."""

    eta: int
    lr: float
    spread: bool = False
    groups: int = 8
    samples: int = 8
    num_steps: int = 200
    num_seeds: int = 32
    prompts: int = 8
    length: int = 5
    right: float = 1 / 16
    mismatch: float = 0.0


@dataclass(frozen=True)
class Course:
    """Of one case, by step and seed: `success` of the policy after the step; `gap` in nats a token, `ess` as a share, of its samples."""

    success: Tensor
    gap: Tensor
    ess: Tensor


def trained(method: Method, setting: Setting, steps: int) -> tuple[Tensor, Tensor]:
    """One table before and after so many steps of fresh samples: [1, prompts, rows, vocab]."""
    tables: list[Tensor] = []
    train(method, replace(setting, eta=0, num_steps=steps, num_seeds=1), tables.append)
    return tables[0], tables[-1]


def train(method: Method, setting: Setting, watch: Callable[[Tensor], object] = lambda _: None) -> Course:
    """All seeds side by side. `watch` is told every version."""
    generator = torch.Generator().manual_seed(1)
    task = Task.draw(setting.prompts, setting.length, setting.right)
    logits = start(setting.num_seeds, setting.prompts, setting.length, generator).requires_grad_()
    first = logits.detach().clone()
    optimizer = torch.optim.Adam([logits], lr=setting.lr)
    watch(first)

    def engine(table: Tensor) -> Tensor:
        return table + setting.mismatch * torch.randn(table.shape, generator=generator, dtype=table.dtype) if setting.mismatch else table

    history = deque([engine(first)], maxlen=1 + (LONGEST if setting.spread else 1) * setting.eta)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for version in range(setting.num_steps):
        prompts, tokens, rows, batch = _sampled(method, setting, task, history, logits.detach(), first, version, generator)
        for part in range(MINIBATCHES):
            groups = slice(part * setting.groups // MINIBATCHES, (part + 1) * setting.groups // MINIBATCHES)
            optimizer.zero_grad()
            current = of(logits, prompts[:, groups], tokens[:, groups], rows[:, groups])
            method.loss(current, batch.part(groups), version).backward()
            optimizer.step()
        watch(now := logits.detach().clone())
        history.append(engine(now))
        apart = (batch.proximal - batch.behavior).flatten(1)
        weights = apart.exp()
        ess = weights.sum(-1).square() / weights.square().sum(-1) / weights.shape[-1]
        with torch.no_grad():
            found.append((success(logits, task), apart.abs().mean(-1), ess))
    return Course(*(torch.stack(each) for each in zip(*found, strict=True)))


def _sampled(method: Method, setting: Setting, task: Task, history: deque[Tensor], now: Tensor, first: Tensor, version: int,
             generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Batch]:
    """The batch of a step, from versions that are as old as they are to be."""
    shape = (setting.num_seeds, setting.groups)
    lags = torch.full(shape, setting.eta)
    if setting.spread and setting.eta:
        drawn = torch.exp(SIGMA * torch.randn(shape, generator=generator) - SIGMA**2 / 2) * setting.eta
        lags = drawn.round().long().clamp(0, LONGEST * setting.eta)
    lags = lags.clamp(max=version)
    prompts = torch.randint(setting.prompts, shape, generator=generator)
    tokens = torch.zeros(*shape, setting.samples, 0, dtype=torch.int64)
    behavior = rows = tokens
    for lag in lags.unique().tolist():
        table = history[-1 - lag]
        got, through = answers(table, prompts, setting.samples, generator)
        chances = of(table, prompts, got, through)
        if not tokens.numel():
            tokens, rows, behavior = got, through, chances
        else:
            chosen = (lags == lag)[..., None, None]
            tokens, rows, behavior = (torch.where(chosen, new, old) for new, old in ((got, tokens), (through, rows), (chances, behavior)))
    rewards = task.rewards(prompts[..., None].expand(*tokens.shape[:-1]), tokens)
    batch = Batch(behavior, of(now, prompts, tokens, rows), of(first, prompts, tokens, rows), method.estimate(rewards), version - lags)
    return prompts, tokens, rows, method.prepared(batch)


def answers(table: Tensor, prompts: Tensor, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Answers, and their rows: [seeds, groups, samples, length] of prompts [seeds, groups]."""
    tokens, rows = sample(table, prompts.repeat_interleave(samples, 1), generator)
    shape = (*prompts.shape, samples, tokens.shape[-1])
    return tokens.view(shape), rows.view(shape)


def of(table: Tensor, prompts: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Log-probs of answers [seeds, groups, samples, length]."""
    each = prompts.repeat_interleave(tokens.shape[2], 1)
    return logprobs(table, each, tokens.flatten(1, 2), rows.flatten(1, 2)).view(tokens.shape)

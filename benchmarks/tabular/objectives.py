"""The objectives of conf/algorithm as they are applied to a table's answers: the loss is policy_loss itself, its parts are those of a training step.

A training step has two minibatches, and its proximal policy is the one from before both (AReaL, arXiv 2505.24298, Eq. 5).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.configs import composed
from launcher.__main__ import CONF
from workers.algorithms import advantages
from workers.algorithms.aggregation import normalizer
from workers.algorithms.corrections import second_moment_cut, trust_region_tokens
from workers.algorithms.policy_loss import Objective, TokenInputs, policy_loss
from workers.algorithms.proximal import loglinear_logprobs
from workers.algorithms.ratios import Responses
from workers.config import AlgorithmConfig
from workers.config.choices import Advantage, KlPlace, OffPolicy, Proximal
from workers.trainer.megatron.objective import objective_of

ESTIMATORS: dict[Advantage, Callable[[Tensor], Tensor]] = {
    Advantage.group_norm: advantages.group_norm, Advantage.group_center: advantages.group_center, Advantage.leave_one_out: advantages.leave_one_out}
"""Those that need nothing but the rewards of a group."""


@dataclass(frozen=True)
class Batch:
    """Answers of one training step, float64 or int64 [seeds, groups, samples, length]; `versions` [seeds, groups]: which version sampled them."""

    behavior: Tensor
    proximal: Tensor
    reference: Tensor
    advantages: Tensor
    versions: Tensor
    kept: Tensor | None = None

    def part(self, groups: slice) -> Batch:
        """Some of the groups."""
        return Batch(*(None if each is None else each[:, groups] for each in (  # type: ignore[arg-type]
            self.behavior, self.proximal, self.reference, self.advantages, self.versions, self.kept)))


@dataclass(frozen=True)
class Method:
    """An objective by its name in conf/algorithm."""

    name: str
    config: AlgorithmConfig
    objective: Objective

    def loss(self, current: Tensor, batch: Batch, version: int) -> Tensor:
        """The sum over seeds of the loss of a minibatch. `current` [seeds, groups, samples, length], with gradient; `version`: before the step."""
        seeds, groups, samples, length = current.shape
        proximal = batch.proximal
        if self.config.proximal is Proximal.loglinear:
            versions = batch.versions[..., None, None].expand_as(current)
            proximal = loglinear_logprobs(current, batch.behavior, versions, version)
        number = seeds * groups * samples
        responses = Responses(torch.arange(number).repeat_interleave(length), torch.full((number,), float(length), dtype=torch.float64))
        gains = batch.advantages[..., None].expand_as(current)
        mask = torch.ones(number * length, dtype=torch.bool)
        inputs = TokenInputs(current.flatten(), proximal.flatten(), batch.behavior.flatten(), gains.flatten(), mask,
                             reference=batch.reference.flatten() if self.objective.kl_weight else None,
                             kept=None if batch.kept is None else batch.kept.flatten(), responses=responses)
        divisor = normalizer(self.objective.aggregation, groups * samples * length, groups * samples, length)
        return policy_loss(inputs, self.objective, normalizer=divisor)[0]

    def estimate(self, rewards: Tensor) -> Tensor:
        """Advantages of rewards [..., samples]."""
        return ESTIMATORS[self.config.advantage](rewards)

    def prepared(self, batch: Batch) -> Batch:
        """With what is decided over the whole step: the tokens that M2PO's mask keeps, of each seed by itself."""
        if self.config.off_policy is not OffPolicy.second_moment:
            return batch
        apart = (batch.proximal - batch.behavior).detach()
        kept = torch.ones_like(apart, dtype=torch.bool)
        for seed in range(len(apart)):
            squares, inside = apart[seed].square(), trust_region_tokens(apart[seed], batch.advantages[seed][..., None].expand_as(apart[seed]))
            kept[seed] = ~inside | (squares <= second_moment_cut(squares[inside], self.config.second_moment))
        return dataclasses.replace(batch, kept=kept)


@functools.cache
def method(name: str) -> Method | str:
    """That of conf/algorithm, or why a table cannot be trained with it."""
    config = composed(["model=tiny", f"algorithm={name}"]).algorithm
    if config.critic:
        return "it trains a critic"
    if config.advantage not in ESTIMATORS:
        return f"advantage={config.advantage.value} is of whole batches"
    if config.kl_in is not KlPlace.loss and config.kl_weight:
        return "its rewards hold a divergence from the starting model"
    return Method(name, config, objective_of(config))


def methods() -> tuple[list[Method], dict[str, str]]:
    """All that a table can be trained with, and why the others cannot."""
    found = {name: method(name) for name in sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))}
    return [each for each in found.values() if isinstance(each, Method)], {name: why for name, why in found.items() if isinstance(why, str)}

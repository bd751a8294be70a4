"""The critic: a value model that is trained beside the policy, and the advantages that it gives.

    groups of this copy --forward, before the step--> values of all response tokens
        |  gae: over each response's actions; its reward comes with the last one, a penalty with each
        v
    returns [tokens]                     advantages [tokens], normalised over the actions of all copies
        |  minibatch by minibatch            |
        v                                    v
    clipped value loss -> critic         policy_loss -> policy

Actions: preparation.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from workers.algorithms.advantages import moments, whiten
from workers.algorithms.loss_statistics import Stats
from workers.algorithms.values import clipped_value_loss, gae
from workers.config import AlgorithmConfig, Config, TrainerConfig
from workers.model.architecture import Architecture
from workers.trainer.batch.context_parallel import RankPart
from workers.trainer.batch.group import TrainGroup
from workers.trainer.batch.sequence_layout import PackedBatch
from workers.trainer.megatron.model.value_model import build_value_model
from workers.trainer.megatron.objective import TokenValues, own_tokens
from workers.trainer.megatron.parallel.stop_gate import StopGate
from workers.trainer.megatron.preparation import Actions, over_copies
from workers.trainer.megatron.trained_model import TrainedModel

NO_VARIANCE = 1e-12


@dataclass(frozen=True)
class Estimates:
    """What the critic says of a share of a batch before it is trained on: float32 by group, response and token; `returns` and
    `advantages` are 0 where a token is no action. `metrics` are of the whole batch."""

    values: TokenValues
    returns: TokenValues
    advantages: TokenValues
    metrics: dict[str, float]


class Critic:
    """This rank's part of the value model, in the policy's layout, with its own optimizer and schedule."""

    def __init__(self, config: Config, architecture: Architecture, folder: Path, inverse_frequencies: Tensor, dtype: torch.dtype) -> None:
        """Begin as the model in `folder`. Call within `cpu_backend.redirected()`, groups initialised."""
        self._algorithm = config.algorithm
        model = build_value_model(architecture, folder, dtype, config.trainer, config.run.seed)
        self.trained = TrainedModel(model, _trainer_config(config), config.run, inverse_frequencies, dtype, "algorithm.critic_lr")

    def estimate(self, groups: list[TrainGroup], gate: StopGate, penalties: TokenValues | None = None) -> Estimates:
        """Values and advantages of this copy's share of a batch, whose actions' rewards are less `penalties`; all ranks call this together.
        Raises StepAbandoned where asked to stop."""
        [values] = self.trained.passes.evaluate(groups, list(range(len(groups))), gate, num_values=1)
        return estimates(groups, values, self._algorithm, penalties)

    def accumulate(self, groups: list[TrainGroup], indices: list[int], estimated: Estimates, normalizer: float, gate: StopGate) -> list[Stats]:
        """This rank's share of the gradients of the value loss of a minibatch; returns the statistics of its micro-batches."""
        self.trained.zero_gradients()
        loss = partial(microbatch_value_loss, groups=groups, estimated=estimated, normalizer=normalizer, clip=self._algorithm.value_clip)
        return self.trained.passes.run(groups, indices, loss, forward_only=False, gate=gate)

    def clip(self, stats: list[Stats], step: int, number: int) -> dict[str, float]:
        """As TrainedModel.clip, for what `accumulate` gave."""
        return self.trained.clip(stats, {"loss": torch.zeros(())}, step, number)

    def metrics(self, totals: dict[str, float], number: int) -> dict[str, float]:
        """Of a step of `number` minibatches, which add up to `totals`."""
        return {"value_loss": totals["loss"] / number, "value_grad_norm": totals["grad_norm"] / number, "critic_lr": self.trained.lr}


def _trainer_config(config: Config) -> TrainerConfig:
    """The trainer's, with the critic's learning rate: its schedule has the same shape."""
    lr, trainer = config.algorithm.critic_lr, config.trainer
    return dataclasses.replace(trainer, lr=lr, min_lr=lr * trainer.min_lr / trainer.lr if trainer.lr else 0.0)


def microbatch_value_loss(batch: PackedBatch, part: RankPart, output: Tensor, *, groups: list[TrainGroup], estimated: Estimates,
                          normalizer: float, clip: float) -> tuple[Tensor, Stats]:
    """The value loss of this rank's `part` of the tokens in `batch`, divided by the minibatch's `normalizer`; `output` float32 [1, n] are values."""
    old, returns, mask = (own_tokens(batch, part, value, output.device) for value in (
        lambda group, sample: estimated.values[group][sample],
        lambda group, sample: estimated.returns[group][sample],
        lambda group, sample: groups[group].loss_mask[sample]))
    return clipped_value_loss(output[0], old, returns, mask.bool(), normalizer=normalizer, clip=clip)


def estimates(groups: list[TrainGroup], values: TokenValues, algorithm: AlgorithmConfig, penalties: TokenValues | None = None) -> Estimates:
    """Advantages and returns by GAE from the `values` of a share of a batch; all ranks call this together, those of a copy with the same."""
    actions = Actions(groups)
    value = actions.take(values)
    advantage, returns = gae(actions.rewards(penalties), value, actions.lengths, algorithm.gamma, algorithm.gae_lambda)
    _, left = moments(advantage, over_copies)
    return_mean, variance = moments(returns, over_copies)
    return Estimates(values, actions.spread(returns), actions.spread(whiten(advantage, over_copies)), {
        "explained_variance": 1 - left / variance if variance > NO_VARIANCE else 0.0,  # what returns have over values is the advantages
        "value_mean": moments(value, over_copies)[0], "return_mean": return_mean})

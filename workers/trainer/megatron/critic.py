"""The critic: a value model that is trained beside the policy, and the advantages that it gives.

    groups of this copy --forward, before the step--> values of all response tokens
        |  gae: over each response's actions; its reward comes with the last one
        v
    returns [tokens]                     advantages [tokens], normalised over the actions of all copies
        |  minibatch by minibatch            |
        v                                    v
    clipped value loss -> critic         decoupled_ppo_loss -> policy

Actions are the tokens that are trained on. The others (a tool's answer between two turns) are neither valued nor counted: the state after
an action is the one in which the next action is taken.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from workers.algorithms.losses import Stats
from workers.algorithms.values import clipped_value_loss, gae
from workers.config import AlgorithmConfig, Config, TrainerConfig
from workers.trainer.batch import TrainGroup
from workers.trainer.context import RankPart
from workers.trainer.layout import PackedBatch
from workers.trainer.megatron import collectives
from workers.trainer.megatron.objective import TokenValues, own_tokens
from workers.trainer.megatron.stop import StopGate
from workers.trainer.megatron.trained_model import TrainedModel
from workers.trainer.megatron.value_model import build_value_model
from workers.weights.architecture import Architecture

EPSILON = 1e-6


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
        model = build_value_model(architecture, folder, dtype, config.trainer)
        self.trained = TrainedModel(model, _trainer_config(config), config.run, inverse_frequencies, dtype, "algorithm.critic_lr")

    def estimate(self, groups: list[TrainGroup], gate: StopGate) -> Estimates:
        """Values and advantages of this copy's share of a batch; all ranks call this together. Raises StepAbandoned where asked to stop."""
        [values] = self.trained.passes.evaluate(groups, list(range(len(groups))), gate, num_values=1)
        return estimates(groups, values, self._algorithm)

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


def estimates(groups: list[TrainGroup], values: TokenValues, algorithm: AlgorithmConfig) -> Estimates:
    """Advantages and returns by GAE from the `values` of a share of a batch; all ranks call this together, those of a copy with the same."""
    masks = [mask for group in groups for mask in group.loss_mask]
    actions = np.concatenate([np.zeros(0, np.bool_), *masks])
    value = np.concatenate([np.zeros(0, np.float32), *(row for rows in values for row in rows)]).astype(np.float64)[actions]
    reward = np.concatenate([np.zeros(0, np.float32), *(group.rewards for group in groups)]).astype(np.float64)
    lengths = np.array([mask.sum() for mask in masks], np.int64)
    advantage, returns = (tensor.numpy() for tensor in gae(
        torch.from_numpy(reward), torch.from_numpy(value), torch.from_numpy(lengths), algorithm.gamma, algorithm.gae_lambda))
    moments = _Moments(advantage, value, returns)
    return Estimates(values, _by_token(returns, actions, groups), _by_token(moments.normalized(advantage), actions, groups), moments.metrics())


def _by_token(of_actions: np.ndarray, actions: np.ndarray, groups: list[TrainGroup]) -> TokenValues:
    """Values of actions, float32, at their places among the responses' tokens; `actions` bool [tokens] says which tokens those are."""
    spread = np.zeros(len(actions), np.float32)
    spread[actions] = of_actions
    ends = np.cumsum([len(response) for group in groups for response in group.responses])
    rows = iter(np.split(spread, ends[:-1]))
    return [[next(rows) for _ in group.responses] for group in groups]


class _Moments:
    """Means and variances over the actions of all copies. What returns have over values is the advantages."""

    def __init__(self, advantage: np.ndarray, value: np.ndarray, returns: np.ndarray) -> None:
        sums = collectives.sum_over_copies(np.array([len(value), advantage.sum(), value.sum(), returns.sum()], np.float64))
        number = max(1.0, float(sums[0]))
        self._advantage, self._value, self._return = (float(total) / number for total in sums[1:])
        squares = np.array([np.square(advantage - self._advantage).sum(), np.square(returns - self._return).sum()], np.float64)
        self._advantage_variance, self._return_variance = (float(total) / number for total in collectives.sum_over_copies(squares))

    def normalized(self, advantage: np.ndarray) -> np.ndarray:
        """Of mean 0 and standard deviation 1."""
        return (advantage - self._advantage) / (self._advantage_variance**0.5 + EPSILON)

    def metrics(self) -> dict[str, float]:
        """`explained_variance`: 1 - Var(returns - values) / Var(returns), 0 where all returns are equal."""
        explained = 1 - self._advantage_variance / self._return_variance if self._return_variance > EPSILON**2 else 0.0
        return {"explained_variance": explained, "value_mean": self._value, "return_mean": self._return}

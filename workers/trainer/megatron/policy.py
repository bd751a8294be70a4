"""The policy in training: where its loss gets its log-probs from, minibatch by minibatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from workers.algorithms import likelihood
from workers.algorithms.agreement import Agreement
from workers.algorithms.loss_statistics import Stats, summarize
from workers.config import Config, Proximal
from workers.model.architecture import Architecture
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.hf_conversion import Shard, iter_held_tensors, iter_hf_tensors, iter_shards, pieces_of
from workers.trainer.megatron.lora.low_rank import attach, iter_adapter_tensors
from workers.trainer.megatron.model import router_replay
from workers.trainer.megatron.model.model import build_model
from workers.trainer.megatron.objective import (
    PolicyTargets,
    TokenValues,
    microbatch_loss,
    no_stats,
    no_supervised_stats,
    objective_of,
    supervised_loss,
)
from workers.trainer.megatron.parallel.stop_gate import StopGate
from workers.trainer.megatron.trained_model import TrainedModel


class Policy:
    """This rank's part of the policy, with its optimizer and schedule. It begins as the model in `folder`."""

    def __init__(self, config: Config, architecture: Architecture, folder: Path, inverse_frequencies: Tensor, dtype: torch.dtype) -> None:
        """Call within `cpu_backend.redirected()`, groups initialised."""
        self._algorithm, self._supervised, self._objective = config.algorithm, config.supervised, objective_of(config.algorithm)
        model = build_model(architecture, folder, dtype, config.workflow.temperature, config.trainer)
        if config.replayed is not None:
            router_replay.install(model, architecture)
        for piece in pieces_of(model):
            piece.entropy_gradient = self._algorithm.entropy_weight > 0
        self._architecture, self._lora = architecture, config.trainer.lora
        self.adapters = attach(model, architecture, config.trainer.lora, config.run.seed)
        self.trained = TrainedModel(model, config.trainer, config.run, inverse_frequencies, dtype)

    def evaluate(self, groups: list[TrainGroup], indices: list[int], gate: StopGate) -> tuple[TokenValues, TokenValues]:
        """Log-probs and entropies of the groups at `indices`, as PackedPasses.evaluate."""
        logprobs, entropies = self.trained.passes.evaluate(groups, indices, gate)
        return logprobs, entropies

    def hf_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As hf_conversion.iter_hf_tensors, with what adapters add to the weights."""
        return iter_hf_tensors(self.trained.model, self._architecture, self._merged)

    def held_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As hf_conversion.iter_held_tensors, with what adapters add to the weights."""
        return iter_held_tensors(self.trained.model, self._architecture, self._merged)

    def shards(self, sending: Iterable[tuple[Shard, int]]) -> Iterator[list[Tensor]]:
        """As hf_conversion.iter_shards, with what adapters add to the weights."""
        return iter_shards(self.trained.model, self._architecture, sending, self._merged)

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As `iter_adapter_tensors`. Call it only with `trainer.lora.rank`."""
        return iter_adapter_tensors(self.trained.model, self._architecture, self._lora)

    def _merged(self, parameter: Tensor) -> Tensor:
        return parameter if self.adapters is None else self.adapters.merged(parameter)

    def logprobs_at(self, groups: list[TrainGroup], indices: list[int], gate: StopGate, temperature: float) -> TokenValues:
        """The log-probs at another temperature than that of sampling."""
        last = pieces_of(self.trained.model)[-1]
        last.temperature, given = temperature, last.temperature
        try:
            return self.evaluate(groups, indices, gate)[0]
        finally:
            last.temperature = given

    def later_targets(self, first: PolicyTargets, groups: list[TrainGroup], minibatches: list[list[int]], gate: StopGate) -> PolicyTargets:
        """Those of every minibatch but the `first`, whose own pass begins with the weights from before the step. Called before the step.

        Raises StepAbandoned, on all ranks, where one was asked to stop.
        """
        if first.proximal is not None or self._supervised:
            return first
        unknown = dataclasses.replace(first, fresh=None, moved=True)  # the weights from before the step are gone by then
        if not self._algorithm.decoupled:
            return unknown
        match self._algorithm.proximal:
            case Proximal.recompute:
                needed = [index for part in minibatches[1:] for index in part]
                return dataclasses.replace(first, proximal=self.evaluate(groups, needed, gate)[0])
            case Proximal.loglinear:
                return dataclasses.replace(unknown, version=self.trained.scheduler.num_steps)
            case Proximal.reuse:
                return unknown

    def accumulate(self, groups: list[TrainGroup], indices: list[int], targets: PolicyTargets, normalizer: float, gate: StopGate,
                   moves: bool = True) -> list[Stats]:
        """This rank's share of the gradients of a minibatch, of none unless the policy `moves`; returns the statistics of its micro-batches."""
        self.trained.zero_gradients()
        if self._supervised:
            return self.trained.passes.run(groups, indices, partial(supervised_loss, groups=groups, normalizer=normalizer), False, gate)
        with_gradient = [index for index in indices if self._algorithm.regularizes or targets.have_gradient(index)] if moves else []
        without = [index for index in indices if index not in set(with_gradient)]
        loss = partial(microbatch_loss, groups=groups, targets=targets, normalizer=normalizer, objective=self._objective)
        stats = self.trained.passes.run(groups, with_gradient, loss, forward_only=False, gate=gate)
        return stats + self.trained.passes.run(groups, without, loss, forward_only=True, gate=gate)

    def clip(self, stats: list[Stats], step: int, number: int, moves: bool = True) -> dict[str, float]:
        """As TrainedModel.clip, for what `accumulate` gave; without gradients their norm is 0."""
        none = no_supervised_stats() if self._supervised else no_stats(self._objective, self._algorithm.kl_weight > 0)
        return self.trained.clip(stats, none, step, number) if moves else self.trained.totals(stats, none, step, number) | {"grad_norm": 0.0}

    def update(self, step: int, moves: bool = True) -> None:
        """An optimizer step of training step `step`, or, unless the policy `moves`, its place in the schedule only."""
        if moves:
            self.trained.update(step)
        else:
            self.trained.advance(step)

    def metrics(self, totals: dict[str, float], number: int) -> dict[str, float]:
        """Of a step of `number` minibatches, which add up to `totals`."""
        return {
            "loss": totals["loss"] / number,
            "grad_norm": totals["grad_norm"] / number,
            "lr": self.trained.lr,
            "entropy": totals["entropy"] / max(totals["tokens"], 1.0),
            **(likelihood.summarize(totals) if self._supervised else summarize(totals) | Agreement.of(totals).metrics()),
            "num_tokens": totals["tokens"],
            "num_packed_tokens": totals["packed_tokens"],
            "num_microbatches": totals["microbatches"],
            **self.trained.passes.bubble(),
        }

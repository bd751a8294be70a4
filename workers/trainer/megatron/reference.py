"""The reference model: the starting model, which stays as it is while the policy moves away from it, or a teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from workers.config import Config
from workers.model.architecture import Architecture, read_architecture
from workers.model.rope import inverse_frequencies
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.hf_conversion import pieces_of
from workers.trainer.megatron.lora.low_rank import Adapters
from workers.trainer.megatron.model.model import build_model
from workers.trainer.megatron.objective import TokenValues
from workers.trainer.megatron.parallel.stop_gate import StopGate
from workers.trainer.megatron.passes import PackedPasses
from workers.trainer.megatron.policy import Policy
from workers.trainer.megatron.trained_model import in_dtype


class Reference(Protocol):
    """What the divergence of the policy is measured from."""

    def logprobs(self, groups: list[TrainGroup], gate: StopGate) -> TokenValues:
        """Log-probs of all response tokens, at the sampling temperature. Raises StepAbandoned, on all ranks, where one was asked to stop."""
        ...


def open_reference(policy: Policy, config: Config, architecture: Architecture, folder: Path, frequencies: Tensor, dtype: torch.dtype) -> Reference:
    """`algorithm.teacher`, or the model that `policy` began as: in the policy itself, where that trains adapters, else a second one. Call within
    `cpu_backend.redirected()`, groups initialised. Raises ModelError."""
    if config.algorithm.teacher:
        folder = Path(config.algorithm.teacher)
        architecture = read_architecture(folder)
        return ReferenceModel(config, architecture, folder, inverse_frequencies(architecture), dtype)
    if policy.adapters is not None:
        return WithoutAdapters(policy, policy.adapters)
    return ReferenceModel(config, architecture, folder, frequencies, dtype)


class WithoutAdapters:
    """A policy without its adapters: it takes no memory of its own."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        self._policy, self._adapters = policy, adapters

    def logprobs(self, groups: list[TrainGroup], gate: StopGate) -> TokenValues:
        """As `Reference.logprobs`; it chooses its experts itself, as another model would."""
        groups = [dataclasses.replace(group, routing=None) for group in groups]
        with self._adapters.disabled():
            return self._policy.evaluate(groups, list(range(len(groups))), gate)[0]


class ReferenceModel:
    """This rank's part of the model in `folder`, spread like the trained one, without gradients or optimizer. It is no part of a checkpoint."""

    def __init__(self, config: Config, architecture: Architecture, folder: Path, frequencies: Tensor, dtype: torch.dtype) -> None:
        """Call within `cpu_backend.redirected()`, groups initialised. Raises ModelError where the folder does not hold the model."""
        model = build_model(architecture, folder, dtype, config.workflow.temperature, config.trainer)
        model.requires_grad_(False)
        self._passes = PackedPasses([in_dtype(piece, dtype) for piece in pieces_of(model)], config.trainer, frequencies, dtype)

    def logprobs(self, groups: list[TrainGroup], gate: StopGate) -> TokenValues:
        """As `Reference.logprobs`."""
        return self._passes.evaluate(groups, list(range(len(groups))), gate)[0]

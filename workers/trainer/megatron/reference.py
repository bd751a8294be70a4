"""The reference model: the starting model, which stays as it is while the policy moves away from it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from workers.config import Config
from workers.model.architecture import Architecture
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.model.model import build_model
from workers.trainer.megatron.objective import TokenValues
from workers.trainer.megatron.parallel.stop_gate import StopGate
from workers.trainer.megatron.passes import PackedPasses
from workers.trainer.megatron.trained_model import in_dtype


class ReferenceModel:
    """This rank's part of the model in `folder`, spread like the trained one, without gradients or optimizer. It is no part of a checkpoint."""

    def __init__(self, config: Config, architecture: Architecture, folder: Path, inverse_frequencies: Tensor, dtype: torch.dtype) -> None:
        """Call within `cpu_backend.redirected()`, groups initialised. Raises ModelError where the folder does not hold the model."""
        model = build_model(architecture, folder, dtype, config.workflow.temperature, config.trainer)
        model.requires_grad_(False)
        self._passes = PackedPasses(in_dtype(model, dtype), config.trainer, inverse_frequencies, dtype)

    def logprobs(self, groups: list[TrainGroup], gate: StopGate) -> TokenValues:
        """Log-probs of all response tokens, at the sampling temperature. Raises StepAbandoned, on all ranks, where one was asked to stop."""
        return self._passes.evaluate(groups, list(range(len(groups))), gate)[0]

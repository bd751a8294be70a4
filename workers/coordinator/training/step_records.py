"""What is recorded of training: finished steps, held-out losses and groups. Pure data; process/run_records.py writes it."""

from __future__ import annotations

from dataclasses import dataclass

from workers.coordinator.groups.consumption import BatchAges
from workers.coordinator.groups.heldout_evaluation import EvaluationResult
from workers.coordinator.groups.rejections import Sampled
from workers.messages.parts import Group


@dataclass(frozen=True)
class StepRecord:
    """A finished training step: the trainer's metrics, the ages of what it consumed, which prompts those were, what was sampled meanwhile, the share
    of the engines' room that staleness left empty meanwhile, and the groups that are kept to be read."""

    step: int
    ages: BatchAges
    metrics: dict[str, float]
    consumed: list[int]
    sampled: Sampled
    held_back: float
    kept: list[Group]


@dataclass(frozen=True)
class HeldoutGroup:
    """A finished group of the evaluation at `step`."""

    step: int
    group: Group


@dataclass(frozen=True)
class HeldoutLoss:
    """The loss of the version `step` on the held-out responses, nats per token."""

    step: int
    loss: float
    num_tokens: int


Record = StepRecord | HeldoutLoss | HeldoutGroup | EvaluationResult

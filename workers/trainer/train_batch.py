"""One training step from a received batch, as every rank does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from workers.algorithms.advantages import batch_norm, group_norm
from workers.config import Advantage, Config
from workers.messages.groups import head_step, samples
from workers.messages.types import Batch, Group
from workers.trainer.batch import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine


def to_train_group(group: Group) -> TrainGroup:
    """A received group as the engine takes it."""
    views = samples(group)
    return TrainGroup(
        group_id=group.group_id, prompt=np.asarray(group.prompt, np.int32),
        responses=[np.asarray(view.tokens, np.int32) for view in views],
        behavior_logprobs=[np.asarray(view.logprobs, np.float32) for view in views],
        loss_mask=[np.asarray(view.loss_mask, np.bool_) for view in views],
        rewards=np.asarray(group.rewards, np.float32), versions=[np.asarray(view.steps, np.int32) for view in views],
        head_version=head_step(group))


def compute_advantages(kind: Advantage, groups: list[TrainGroup]) -> list[np.ndarray]:
    """Advantages, float32 [n] for each group."""
    if kind is Advantage.group_norm:
        return [group_norm(torch.from_numpy(group.rewards.copy())).numpy() for group in groups]
    flat = batch_norm(torch.from_numpy(np.concatenate([group.rewards for group in groups]))).numpy()
    return np.split(flat, np.cumsum([group.num_samples for group in groups])[:-1])


def train_batch(engine: MegatronEngine, config: Config, batch: Batch, stop_requested: Callable[[], bool]) -> tuple[dict[str, float], int]:
    """Train on `batch`; returns the metrics and how many tokens were trained on. Raises `StepAbandoned` where a stop came in time."""
    groups = [to_train_group(group) for group in batch.groups]
    advantages = compute_advantages(config.algorithm.advantage, groups)
    metrics = engine.train_step(groups, None, advantages, stop_requested)
    return metrics, sum(group.num_valid_tokens for group in groups)

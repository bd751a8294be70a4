"""One training step from a received share of a batch, as every rank does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from workers.algorithms.advantages import batch_norm, episode_norm
from workers.config import Advantage, Config
from workers.messages.groups import group_episodes, head_step, samples
from workers.messages.types import Batch, Group
from workers.trainer.batch import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.selftest import SelfTest


def to_train_group(group: Group) -> TrainGroup:
    """A received group as the engine takes it."""
    views = samples(group)
    return TrainGroup(
        group_id=group.group_id, prompt=np.asarray(group.prompt, np.int32),
        responses=[np.asarray(view.tokens, np.int32) for view in views],
        behavior_logprobs=[np.asarray(view.logprobs, np.float32) for view in views],
        loss_mask=[np.asarray(view.loss_mask, np.bool_) for view in views],
        rewards=np.asarray(group.rewards, np.float32), versions=[np.asarray(view.steps, np.int32) for view in views],
        head_version=head_step(group), episodes=np.asarray(group_episodes(group), np.int32))


def compute_advantages(kind: Advantage, groups: list[TrainGroup], rewards: np.ndarray, firsts: list[int]) -> list[np.ndarray]:
    """Advantages, float32 [n] for each of `groups`, which are a share of a batch: its `rewards` are those of all shares, float32 [N], and
    those of group k begin at `firsts[k]`. Groups are normalised by episodes, a batch by its responses. Not for `gae`, which takes the critic."""
    if kind is Advantage.group_norm:
        return [_group_advantages(group) for group in groups]
    if kind is not Advantage.batch_norm:
        raise ValueError(f"advantages by {kind.value} are not made of rewards alone. Have the engine make them: give it None")
    normed = batch_norm(torch.from_numpy(rewards.copy())).numpy()
    return [normed[first : first + group.num_samples] for first, group in zip(firsts, groups, strict=True)]


def _group_advantages(group: TrainGroup) -> np.ndarray:
    episodes = np.arange(group.num_samples) if group.episodes is None else group.episodes
    return episode_norm(torch.from_numpy(group.rewards.copy()), torch.from_numpy(episodes.astype(np.int64))).numpy()


def train_batch(engine: MegatronEngine, config: Config, share: Batch, stop_requested: Callable[[], bool], self_test: SelfTest) -> dict[str, float]:
    """Train on a batch of which `share` is this copy's; returns the metrics. Raises, with everything as it was before: `StepAbandoned` where a
    stop came in time, `SelfTestFailed` where the engines' log-probs are not the trainer's."""
    groups = [to_train_group(group) for group in share.groups]
    advantages = None if config.supervised or config.algorithm.critic else compute_advantages(
        config.algorithm.advantage, groups, np.asarray(share.rewards, np.float32), share.first_rewards)
    return engine.train_step(groups, share.minibatches, None, advantages, stop_requested, self_test.comparison(share, groups))

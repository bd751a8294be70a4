"""One training step from a received share of a batch, as every rank does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from workers.config import RoutingShape
from workers.messages.arrays import Float32
from workers.messages.from_coordinator import Batch
from workers.messages.from_worker import KeptLogprobs
from workers.messages.groups import group_episodes, kept, samples
from workers.messages.parts import Group
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.selftest.self_test import SelfTest


def to_train_group(group: Group, shape: RoutingShape | None = None) -> TrainGroup:
    """A received group as the engine takes it; `shape`: of its routing, if it has one."""
    views = samples(group)
    routing = None if group.routing is None or shape is None else [
        np.asarray(view.routing).view(shape.dtype).reshape(-1, shape.num_layers, shape.experts_per_token) for view in views]
    return TrainGroup(
        group_id=group.group_id, prompt=np.asarray(group.prompt, np.int32),
        responses=[np.asarray(view.tokens, np.int32) for view in views],
        behavior_logprobs=[np.asarray(view.logprobs, np.float32) for view in views],
        loss_mask=[np.asarray(view.loss_mask, np.bool_) for view in views],
        rewards=np.asarray(group.rewards, np.float32), versions=[np.asarray(view.steps, np.int32) for view in views],
        episodes=np.asarray(group_episodes(group), np.int32), routing=routing)


def kept_logprobs(engine: MegatronEngine, share: Batch, number: int, most_bytes: int) -> KeptLogprobs | None:
    """After a step: the log-probs from before it of the `number` groups that are kept to be read, NaN where its objective has not needed them; None
    where it has needed none, or they are more than a message may have."""
    indices = kept(share.minibatches, number)
    if engine.proximal is None or not indices or sum(4 * share.groups[index].tokens.size for index in indices) > most_bytes:
        return None
    found = [row if len(row) == length else np.full(length, np.nan, np.float32) for index in indices
             for row, length in zip(engine.proximal[index], share.groups[index].lengths.tolist(), strict=True)]
    return KeptLogprobs(share.step + 1, Float32.of(np.concatenate(found)))


def train_batch(engine: MegatronEngine, share: Batch, stop_requested: Callable[[], bool], self_test: SelfTest) -> dict[str, float]:
    """Train on a batch of which `share` is this copy's; returns the metrics. Raises, with everything as it was before: `StepAbandoned` where a
    stop came in time, `SelfTestFailed` where the engines' log-probs are not the trainer's."""
    groups = [to_train_group(group, engine.architecture.routing) for group in share.groups]
    return engine.train_step(groups, share.minibatches, stop_requested=stop_requested, comparison=self_test.comparison(share, groups))

"""A batch that fills its micro-batches: responses as long as they may be."""

from __future__ import annotations

import numpy as np

from workers.config import Config
from workers.trainer.batch.group import TrainGroup


def full_batch(config: Config, vocab_size: int, num_microbatches: int) -> tuple[list[TrainGroup], list[list[int]]]:
    """Groups of responses as long as they may be, so many that each minibatch fills its micro-batches."""
    size, response = config.group_size, config.workflow.max_new_tokens
    prompt = max(1, config.engine.context_length - response)
    shared = config.trainer.share_prompts and size > 1
    tokens = prompt + size * response if shared else size * (prompt + response)
    number = max(1, num_microbatches * config.trainer.microbatch_tokens // tokens)
    rng = np.random.default_rng(0)

    def some(length: int) -> np.ndarray:
        return rng.integers(0, vocab_size, length).astype(np.int32)

    groups = [TrainGroup(
        group_id=str(index), prompt=some(prompt), responses=[some(response) for _ in range(size)],
        behavior_logprobs=[np.full(response, -1.0, np.float32)] * size, loss_mask=[np.ones(response, bool)] * size, rewards=signs(size),
        versions=[np.zeros(response, np.int32)] * size) for index in range(number * config.trainer.num_minibatches)]
    return groups, [list(map(int, part)) for part in np.array_split(np.arange(len(groups)), config.trainer.num_minibatches)]


def signs(number: int) -> np.ndarray:
    """1, -1, 1, ...: nothing whose gradient would be left out."""
    return np.where(np.arange(number) % 2, -1.0, 1.0).astype(np.float32)

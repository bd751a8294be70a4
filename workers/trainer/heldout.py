"""The loss on held-out examples, of a supervised run. All ranks take part: each copy of the model passes its share of the examples forward."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np

from workers.config import Config
from workers.data.examples import Example, open_examples
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives, process_group


class HeldoutExamples:
    """This copy's share of the held-out examples, which every process reads by itself."""

    def __init__(self, config: Config, engine: MegatronEngine) -> None:
        self._engine = engine
        examples = open_examples(config).heldout()
        self._groups = [to_group(example) for example in examples[process_group.copy_index()::process_group.num_copies()]]

    def measure(self) -> dict[str, float]:
        """Metrics, the same on all ranks, which call this together: heldout_loss (nats per token of the responses) and heldout_tokens."""
        rows = self._engine.logprobs(self._groups)
        tokens = sum(group.num_valid_tokens for group in self._groups)
        own = math.fsum(chain.from_iterable(row.tolist() for group in rows for row in group))
        total, number = collectives.sum_over_copies(np.array([own, tokens], np.float64)).tolist()
        return {"heldout_loss": -total / number, "heldout_tokens": number}


def to_group(example: Example) -> TrainGroup:
    """One response, all of which counts."""
    response = np.array(example.response, np.int32)
    return TrainGroup(
        group_id=example.id, prompt=np.array(example.prompt, np.int32), responses=[response],
        behavior_logprobs=[np.zeros(len(response), np.float32)], loss_mask=[np.ones(len(response), np.bool_)],
        rewards=np.zeros(1, np.float32), versions=[np.zeros(len(response), np.int32)])

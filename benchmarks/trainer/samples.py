"""The model and the samples that benchmarks.trainer gives to every system that it compares: in one folder, the same for all."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from workers.trainer.batch.group import TrainGroup

SAMPLES = 8
MODEL, TASK, ARRAYS = "model", "task.json", "samples.npz"


@dataclass(frozen=True)
class Task:
    """What a system is to do, and with what: `microbatch_tokens` is the most it may pass at once, padding included."""

    num_groups: int
    min_prompt: int
    max_prompt: int
    median_answer: float
    sigma: float
    max_answer: int
    microbatch_tokens: int
    dtype: str
    num_threads: int
    vocab_size: int = 4096
    hidden_size: int = 256
    num_layers: int = 6

    @property
    def sequences(self) -> int:
        """Sequences of a padded micro-batch: so many that even the longest fit. A power of two, which divides every batch."""
        return 2 ** int(np.log2(max(1, self.microbatch_tokens // (self.max_prompt + self.max_answer))))


def write(folder: Path, task: Task) -> list[TrainGroup]:
    """Make a random Qwen3 and ragged groups; returns the groups.

    Lengths are lognormal, and alike to some degree in one group. Rewards are advantages: they add up to zero in a group.
    """
    torch.manual_seed(0)
    logging.disable_progress_bar()
    config = Qwen3Config(
        vocab_size=task.vocab_size, hidden_size=task.hidden_size, intermediate_size=4 * task.hidden_size, num_hidden_layers=task.num_layers,
        num_attention_heads=task.hidden_size // 64, num_key_value_heads=max(1, task.hidden_size // 128), head_dim=64,
        max_position_embeddings=task.max_prompt + task.max_answer, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder / MODEL)
    draw = random.Random(0)
    groups = [_group(number, task, draw) for number in range(task.num_groups)]
    _set_behavior(model, groups)
    arrays: dict[str, Any] = {}
    for number, group in enumerate(groups):
        arrays |= {f"{number}.prompt": group.prompt, f"{number}.rewards": group.rewards}
        arrays |= {f"{number}.{sample}": response for sample, response in enumerate(group.responses)}
        arrays |= {f"{number}.{sample}.logprobs": values for sample, values in enumerate(group.behavior_logprobs)}
    np.savez(folder / ARRAYS, **arrays)
    (folder / TASK).write_text(json.dumps(asdict(task)))
    return groups


def read(folder: Path) -> tuple[Task, list[TrainGroup]]:
    """What `write` wrote."""
    task = Task(**json.loads((folder / TASK).read_text()))
    arrays = np.load(folder / ARRAYS)
    return task, [_train_group(
        number, arrays[f"{number}.prompt"], [arrays[f"{number}.{sample}"] for sample in range(SAMPLES)],
        [arrays[f"{number}.{sample}.logprobs"] for sample in range(SAMPLES)], arrays[f"{number}.rewards"]) for number in range(task.num_groups)]


def useful_tokens(groups: list[TrainGroup]) -> int:
    """Tokens of all samples, each with its prompt: what a system without padding and without sharing passes."""
    return sum(len(group.prompt) + len(response) for group in groups for response in group.responses)


def _group(number: int, task: Task, draw: random.Random) -> TrainGroup:
    prompt = np.array([draw.randrange(3, task.vocab_size) for _ in range(draw.randint(task.min_prompt, task.max_prompt))], np.int32)
    shared, responses = draw.gauss(0, 1), []
    for _ in range(SAMPLES):
        length = int(task.median_answer * np.exp(task.sigma * (0.7 * shared + 0.51**0.5 * draw.gauss(0, 1))))
        responses.append(np.array([draw.randrange(3, task.vocab_size) for _ in range(min(task.max_answer, max(2, length)))], np.int32))
    rewards = np.array([(-1.0) ** sample for sample in range(SAMPLES)], np.float32)
    return _train_group(number, prompt, responses, [np.zeros(len(response), np.float32) for response in responses], rewards)


def _train_group(number: int, prompt: np.ndarray, responses: list[np.ndarray], logprobs: list[np.ndarray], rewards: np.ndarray) -> TrainGroup:
    return TrainGroup(
        group_id=f"g{number}", prompt=prompt, responses=responses, behavior_logprobs=logprobs, rewards=rewards,
        loss_mask=[np.ones(len(response), np.bool_) for response in responses],
        versions=[np.zeros(len(response), np.int32) for response in responses])


@torch.inference_mode()
def _set_behavior(model: PreTrainedModel, groups: list[TrainGroup]) -> None:
    """Log-probs of the model as it is: all systems then have the same first gradient, whatever their losses make of old samples."""
    for group in groups:
        for sample, response in enumerate(group.responses):
            ids = torch.from_numpy(np.concatenate([group.prompt, response]).astype(np.int64))[None]
            logits = model(ids, logits_to_keep=len(response) + 1).logits[0, :-1]
            group.behavior_logprobs[sample] = logits.log_softmax(-1).gather(1, ids[0, -len(response):, None])[:, 0].numpy()

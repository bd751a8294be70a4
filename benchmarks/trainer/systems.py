"""One system that makes training steps, in a process of its own: python -m benchmarks.trainer.systems FOLDER SYSTEM.

FOLDER is what samples.py wrote. For every line on standard input the system makes one step, the same samples again,
and answers with a line of JSON: seconds, cpu_seconds (of all its threads), grad_norm, peak_mib (highest resident memory of
the process so far, or what was allocated on its GPU). Systems:
- headway: `MegatronEngine.train_step`; `unshared`: with a copy of the prompt for every sample; `whole`: with log-probs
  from whole logits, by log_softmax under autograd, instead of lm_head.py
- padded: a transformers model with sdpa, micro-batches of equal numbers of sequences padded to their longest, torch's AdamW,
  and the same loss
- trl: TRL's GRPOTrainer, see trl.py
All have one optimizer step, the same hyper-parameters, and the same number of threads.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.trainer.samples import MODEL, Task, read
from benchmarks.trainer.turns import BETAS, CLIP, DEVICE, EPS, LR, WEIGHT_DECAY, Turns
from workers.algorithms.policy_loss import Objective, TokenInputs, policy_loss
from workers.config import Config, Dtype, TrainerConfig
from workers.trainer.batch.group import TrainGroup


def headway(folder: Path, task: Task, groups: list[TrainGroup], turns: Turns, share_prompts: bool = True) -> None:
    """Steps of this project's engine."""
    from workers.trainer.megatron.engine import MegatronEngine

    config = Config()
    config.trainer = TrainerConfig(
        batch_groups=len(groups), num_minibatches=1, microbatch_tokens=task.microbatch_tokens, share_prompts=share_prompts,
        dtype=Dtype(task.dtype), num_threads=task.num_threads, lr=LR, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPS,
        weight_decay=WEIGHT_DECAY, clip_grad=CLIP)
    config.workflow.temperature = 1.0
    engine = MegatronEngine(config, folder / MODEL)
    advantages = [group.rewards for group in groups]
    while True:
        turns.wait()
        metrics = engine.train_step(groups, [list(range(len(groups)))], None, advantages)
        turns.end()
        turns.answer(metrics["grad_norm"])


def whole(folder: Path, task: Task, groups: list[TrainGroup], turns: Turns) -> None:
    """The engine with whole logits."""
    from workers.trainer.megatron.model import model

    def whole_logprobs(hidden: Tensor, weight: Tensor, index: Tensor, targets: Tensor, temperature: float, *_: object,
                       **__: object) -> tuple[Tensor, Tensor]:
        table = torch.log_softmax((hidden @ weight.t()).float() / temperature, dim=-1)
        entropy = -(table.detach().exp() * table.detach()).sum(dim=-1)
        index, targets = index.to(hidden.device), targets.to(hidden.device)
        return table[index, targets], entropy[index]

    model.token_logprobs = whole_logprobs  # type: ignore[assignment]
    headway(folder, task, groups, turns)


def _microbatches(groups: list[TrainGroup], sequences: int) -> Iterator[dict[str, Tensor]]:
    """Padded micro-batches in the order of the samples: ids, attention [B, T]; at [B, T - 1]: behavior, advantage, mask."""
    rows = [(group, sample) for group in groups for sample in range(group.num_samples)]
    for start in range(0, len(rows), sequences):
        part = rows[start:start + sequences]
        longest = max(len(group.prompt) + len(group.responses[sample]) for group, sample in part)
        batch = {"ids": torch.zeros(len(part), longest, dtype=torch.int64), "attention": torch.zeros(len(part), longest, dtype=torch.int64),
                 "behavior": torch.zeros(len(part), longest - 1), "advantage": torch.zeros(len(part), longest - 1),
                 "mask": torch.zeros(len(part), longest - 1, dtype=torch.bool)}
        for row, (group, sample) in enumerate(part):
            tokens = np.concatenate([group.prompt, group.responses[sample]])
            answer = slice(len(group.prompt) - 1, len(tokens) - 1)
            batch["ids"][row, :len(tokens)] = torch.from_numpy(tokens)
            batch["attention"][row, :len(tokens)] = 1
            batch["behavior"][row, answer] = torch.from_numpy(group.behavior_logprobs[sample])
            batch["advantage"][row, answer] = float(group.rewards[sample])
            batch["mask"][row, answer] = True
        yield {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def padded(folder: Path, task: Task, groups: list[TrainGroup], turns: Turns) -> None:
    """The usual loop around a transformers model."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / MODEL, dtype=getattr(torch, task.dtype), attn_implementation="sdpa")
    model.to(DEVICE).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    normalizer = float(sum(group.num_valid_tokens for group in groups))
    while True:
        turns.wait()
        for batch in _microbatches(groups, task.sequences):
            first = int(batch["mask"].any(dim=0).int().argmax())  # no logits where all rows are still prompts
            logits = model(input_ids=batch["ids"], attention_mask=batch["attention"], use_cache=False,
                           logits_to_keep=batch["ids"].shape[1] - first).logits[:, :-1].float()
            logprobs = logits.log_softmax(dim=-1).gather(-1, batch["ids"][:, first + 1:, None])[..., 0]
            behavior, advantage, mask = (batch[name][:, first:].reshape(-1) for name in ("behavior", "advantage", "mask"))
            flat = logprobs.reshape(-1)
            policy_loss(TokenInputs(flat, flat.detach(), behavior, advantage, mask), Objective(), normalizer=normalizer)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turns.end()
        turns.answer(float(norm))


def main() -> None:
    """Run until standard input ends."""
    folder, system = Path(sys.argv[1]), sys.argv[2]
    turns = Turns()
    task, groups = read(folder)
    torch.set_num_threads(task.num_threads)
    if system == "trl":
        from benchmarks.trainer.trl import trl

        trl(folder, task, groups, turns)
    elif system == "unshared":
        headway(folder, task, groups, turns, share_prompts=False)
    else:
        {"headway": headway, "whole": whole, "padded": padded}[system](folder, task, groups, turns)


if __name__ == "__main__":
    main()

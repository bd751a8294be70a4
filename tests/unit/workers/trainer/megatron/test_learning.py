"""Every algorithm's file, in one process: a small model is rewarded for some tokens, which an older copy of it samples, and learns to say them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("megatron.core")

from tests.support.algorithm_files import FILES, algorithm_of
from tests.support.hf_reference import load_reference
from tests.support.megatron_case import VOCAB, config, write_model
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine

pytestmark = pytest.mark.usefixtures("megatron_groups")

NUM_STEPS, NUM_PROMPTS, GROUP_SIZE, LENGTH = 14, 4, 16, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("model"))


@torch.no_grad()
def sampled(model: Any, temperature: float, version: int, generator: torch.Generator) -> list[TrainGroup]:
    """Groups of responses that `model` samples; a response's reward is its share of tokens of the lower half of the vocabulary."""
    groups = []
    for number in range(NUM_PROMPTS):
        tokens = torch.full((GROUP_SIZE, 1), number)
        logprobs = []
        for _ in range(LENGTH):
            table = torch.log_softmax(model(tokens).logits[:, -1].float() / temperature, dim=-1)
            chosen = torch.multinomial(table.exp(), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], dim=1)
            logprobs.append(table.gather(1, chosen))
        responses = tokens[:, 1:].numpy().astype(np.int32)
        groups.append(TrainGroup(
            group_id=f"g{number}", prompt=np.array([number], np.int32), responses=list(responses),
            behavior_logprobs=list(torch.cat(logprobs, dim=1).numpy()), loss_mask=[np.ones(LENGTH, np.bool_)] * GROUP_SIZE,
            rewards=(responses < VOCAB // 2).mean(axis=1).astype(np.float32), versions=[np.full(LENGTH, version, np.int32)] * GROUP_SIZE))
    return groups


@pytest.mark.parametrize("name", sorted({*FILES} - {"distillation"}))  # which learns from a teacher: test_teacher.py
def test_it_learns_from_what_an_older_policy_has_sampled(folder: Path, name: str) -> None:
    setup = config(num_minibatches=2, lr=5e-3, adam_eps=1e-5, microbatch_tokens=512)
    setup.algorithm = algorithm_of(name)
    if setup.algorithm.critic:
        setup.algorithm = replace(setup.algorithm, critic_warmup_steps=2, critic_lr=5e-3)
    engine, model, generator = MegatronEngine(setup, folder), load_reference(folder), torch.Generator().manual_seed(0)
    rewards, stale, version = [], 0.0, 0
    for step in range(NUM_STEPS):
        if step % 2 == 0:  # every other batch is a step older than the policy that it trains
            model.load_state_dict(dict(engine.iter_hf_tensors()), strict=False)
            version = step
        groups = sampled(model, setup.workflow.temperature, version, generator)
        rewards.append(float(np.mean([group.rewards.mean() for group in groups])))
        metrics = engine.train_step(groups, [[0, 1], [2, 3]])
        stale = max(stale, metrics["gap_current_behavior"])
        moves = step % 2 and step >= setup.algorithm.critic_warmup_steps
        assert (metrics["gap_proximal_behavior"] > 1e-3) is bool(moves), "of the policy before the step, whatever the objective"
    assert stale > 1e-3, "the policy has moved between sampling and training"
    assert np.mean(rewards[-4:]) > np.mean(rewards[:2]) + 0.1

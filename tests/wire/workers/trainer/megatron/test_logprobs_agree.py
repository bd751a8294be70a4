"""The two places that compute log-probs agree: the engine that samples and the trainer, over HTTP and published weights.

Megatron's parallel groups are global to the process: taken over if they are there, and down again at the end of this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from tests.conformance.models import FAMILIES, endless, prompt_of, write_model
from tests.support.megatron_case import train
from tests.support.published import Publisher
from workers.config import Config, EngineConfig, TrainerConfig
from workers.messages.parts import Version
from workers.rollout.engines.client import EngineClient, Generation, SamplingParams
from workers.rollout.engines.servers.process import ServerProcess
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group

TOLERANCE = 1e-3
TEMPERATURE = 0.9
NUM_GROUPS, NUM_SAMPLES = 5, 4
DEADLINE_S = 200.0


@pytest.fixture(scope="module", autouse=True)
def groups_of_this_process() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    process_group.close()


def length_of(group: int, sample: int) -> int:
    """From 1 to 60, ragged within and between groups."""
    return 1 + (17 * group + 23 * sample * (group + 1)) % 60


def trainer_config(share: bool) -> Config:
    config = Config()
    config.workflow.temperature = TEMPERATURE
    config.trainer = TrainerConfig(microbatch_tokens=160, num_minibatches=1, lr=2e-3, share_prompts=share)
    return config


async def sample_groups(client: EngineClient, name: str) -> list[tuple[list[int], list[Generation]]]:
    """Prompts and responses, all generated at once."""
    async with asyncio.TaskGroup() as tasks:
        running = []
        for group in range(NUM_GROUPS):
            prompt = prompt_of(1 + 13 * group, group)
            params = [SamplingParams(length_of(group, sample), TEMPERATURE) for sample in range(NUM_SAMPLES)]
            running.append((prompt, [tasks.create_task(client.generate(f"{name}-{group}-{sample}", prompt, params[sample], 10 * group + sample))
                                     for sample in range(NUM_SAMPLES)]))
    return [(prompt, [task.result() for task in generations]) for prompt, generations in running]


def to_train_groups(sampled: list[tuple[list[int], list[Generation]]]) -> list[TrainGroup]:
    return [TrainGroup(
        group_id=f"g{index}", prompt=np.asarray(prompt, np.int32),
        responses=[np.asarray(generation.tokens, np.int32) for generation in generations],
        behavior_logprobs=[np.asarray(generation.logprobs, np.float32) for generation in generations],
        loss_mask=[np.ones(len(generation.tokens), np.bool_) for generation in generations],
        rewards=np.linspace(-1, 1, NUM_SAMPLES, dtype=np.float32),
        versions=[np.zeros(len(generation.tokens), np.int32) for generation in generations])
            for index, (prompt, generations) in enumerate(sampled)]


def largest_difference(groups: list[TrainGroup], logprobs: list[list[np.ndarray]]) -> float:
    assert [[len(row) for row in rows] for rows in logprobs] == [[len(response) for response in group.responses] for group in groups]
    return max(float(np.abs(row - group.behavior_logprobs[index]).max()) for group, rows in zip(groups, logprobs, strict=True)
               for index, row in enumerate(rows))


async def load(client: EngineClient, megatron: MegatronEngine, publisher: Publisher, version: Version) -> None:
    """Publish what Megatron holds and have the engine load it, as a rollout worker does."""
    published = publisher.publish(megatron.iter_hf_tensors(), version)
    await client.pause("retract")
    await client.update_weights(Path(published.folder), version, flush_cache=True)
    await client.resume()


@pytest.mark.parametrize(("family", "share"), [("llama", True), ("qwen2", False), ("qwen3", True), ("glm4moe", True), ("deepseek", False)])
async def test_engine_and_trainer_agree_before_and_after_training(tmp_path: Path, family: str, share: bool) -> None:
    assert family in FAMILIES
    model = endless(write_model(tmp_path / "model", family, 3))
    server = ServerProcess(EngineConfig(num_slots=16, context_length=256, prefill_chunk=32, start_timeout_s=DEADLINE_S), model, tmp_path / "log")
    client = await server.start(Version(1, 0))
    try:
        megatron = MegatronEngine(trainer_config(share), model)
        publisher = Publisher(tmp_path / "weights", model, torch.float32)
        groups = to_train_groups(await sample_groups(client, "before"))
        assert sorted({len(response) for group in groups for response in group.responses})[0] == 1
        assert len({len(response) for group in groups for response in group.responses}) > 10
        before = megatron.logprobs(groups)
        assert largest_difference(groups, before) <= TOLERANCE

        metrics = train(megatron, groups)
        assert np.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0 and metrics["num_microbatches"] > 1
        assert metrics["behavior_weight_mean"] == pytest.approx(1, abs=1e-3)  # sampled by the very weights that are trained
        assert largest_difference(groups, megatron.logprobs(groups)) > 10 * TOLERANCE  # so the engine's old weights would be noticed

        await load(client, megatron, publisher, Version(1, 1))
        sampled = await sample_groups(client, "after")
        assert {span for _, generations in sampled for generation in generations for span in versions(generation)} == {Version(1, 1)}
        fresh = to_train_groups(sampled)
        assert largest_difference(fresh, megatron.logprobs(fresh)) <= TOLERANCE
        assert any(not np.array_equal(new, old) for a, b in zip(fresh, groups, strict=True)
                   for new, old in zip(a.responses, b.responses, strict=True))
    finally:
        await client.close()
        await server.stop()


def versions(generation: Generation) -> list[Any]:
    return [version for version, _, _ in generation.spans]

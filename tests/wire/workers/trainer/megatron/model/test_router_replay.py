"""What the engine chose, over HTTP and interruptions, replayed in the trainer: of a mixture in bfloat16 on one side and float32 on the other.

Megatron's parallel groups are global to the process: taken over if they are there, and down again at the end of this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("megatron.core")

from tests.conformance.models import prompt_of, write_model
from tests.support.hf_reference import load_reference, reference_logprobs
from workers.config import Config, Dtype, EngineConfig, Interrupt, RouterReplay, RoutingShape, TrainerConfig
from workers.messages.parts import Lease, Purpose, Version
from workers.model.architecture import read_architecture
from workers.rollout.engines.client import EngineError, SamplingParams
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.sampler import Sample, Sampler
from workers.rollout.engines.servers.process import ServerProcess
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group

LENGTH, DEADLINE_S = 60, 200.0


@pytest.fixture(scope="module", autouse=True)
def groups_of_this_process() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    process_group.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mixture") / "model", "glm4moe", 3)


def lease(purpose: Purpose = Purpose.training) -> Lease:
    return Lease("g7" if purpose is Purpose.training else "e0.7", 1, purpose, Version(0, 0), "p", "?", "numeric", "1", 5)


class Tokens:
    """Stands for the tokenizer: tokens are their own text."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


@pytest.fixture
async def engines(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    """A server with the weights that it starts with, which `request.param` says whether tells its routing."""
    config = Config()
    config.engine = EngineConfig(dtype=Dtype.bfloat16, num_slots=4, context_length=256, prefill_chunk=16, start_timeout_s=DEADLINE_S,
                                 interrupt=Interrupt.abort)
    config.model.path = str(model)

    async def unheard() -> None:
        pass

    tells = getattr(request, "param", True)
    engines = Engines(config, lambda _: ServerProcess(config.engine, model, tmp_path / "log", tells_routing=tells), lambda: None, unheard,
                      serve_start=True)
    living = asyncio.create_task(engines.live())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while engines.held is None:
                await asyncio.sleep(0.01)
        yield engines
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)


def group_of(prompt: list[int], found: list[Sample], shape: RoutingShape) -> TrainGroup:
    routing = [np.frombuffer(sample.routing, shape.dtype).reshape(-1, shape.num_layers, shape.experts_per_token) for sample in found]
    return TrainGroup(
        "g", np.array(prompt, np.int32), [np.array(sample.tokens, np.int32) for sample in found],
        [np.array(sample.logprobs, np.float32) for sample in found], [np.ones(len(sample.tokens), np.bool_) for sample in found],
        np.array([1, -1, 0.5], np.float32), [np.zeros(len(sample.tokens), np.int32) for sample in found], routing=routing)


async def sampled(engines: Engines, shape: RoutingShape, prompt: list[int]) -> list[Sample]:
    """Three samples, which are interrupted half-way: the sampler is halted, and another one goes on with what there is."""
    first = Sampler(engines, Tokens(), shape)  # type: ignore[arg-type]
    params, found = SamplingParams(LENGTH, 1.0), [Sample() for _ in range(3)]
    running = [asyncio.create_task(first.sample(lease(), f"r{index}", prompt, params, index, sample)) for index, sample in enumerate(found)]
    client = engines.engines[0].client
    assert client is not None
    async with asyncio.timeout(DEADLINE_S):
        while (await client._call("GET", "/server_info", None))["generated_tokens"] < 30:
            await asyncio.sleep(0)
    assert await first.halt(DEADLINE_S)
    await asyncio.gather(*running)
    halfway = [len(sample.tokens) for sample in found]
    assert all(length > 0 for length in halfway) and not all(sample.finished for sample in found)
    await client.resume()
    engines._closed = False
    second = Sampler(engines, Tokens(), shape)  # type: ignore[arg-type]
    await asyncio.gather(*(second.sample(lease(), f"s{index}", prompt, params, index, sample) for index, sample in enumerate(found)))
    assert any(sample.num_interruptions == 1 for sample in found)
    return found


async def test_samples_that_were_interrupted_are_replayed_as_they_were_computed(engines: Engines, model: Path) -> None:
    shape, prompt = read_architecture(model).routing, prompt_of(20, 3)
    found = await sampled(engines, shape, prompt)
    group = group_of(prompt, found, shape)
    config = Config()
    config.workflow.temperature = 1.0
    config.trainer = TrainerConfig(microbatch_tokens=512, num_minibatches=1, lr=1e-3)
    config.algorithm.router_replay = RouterReplay.rollout
    trainer = MegatronEngine(config, model)
    logprobs, own = trainer.logprobs([group])[0], trainer.logprobs([replace(group, routing=None)])[0]
    with torch.no_grad():
        expected = reference_logprobs(load_reference(model), group, 1.0)[0]
    assert max(float(np.abs(row - other.numpy()).max()) for row, other in zip(logprobs, expected, strict=True)) < 1e-4
    told = np.concatenate(group.behavior_logprobs)
    assert np.abs(np.concatenate(logprobs) - told).mean() < np.abs(np.concatenate(own) - told).mean()
    trainer.close()


@pytest.mark.parametrize("engines", [False], indirect=True)
async def test_a_server_that_does_not_tell_is_found_out_and_held_out_prompts_ask_for_nothing(engines: Engines, model: Path) -> None:
    sampler, params = Sampler(engines, Tokens(), read_architecture(model).routing), SamplingParams(5, 1.0)  # type: ignore[arg-type]
    assert (await sampler.sample(lease(Purpose.evaluation), "e", prompt_of(4), params, 1)).routing == b""
    with pytest.raises(EngineError, match="routed_experts that do not fit.*algorithm.router_replay=off"):
        await sampler.sample(lease(), "t", prompt_of(4), params, 1)

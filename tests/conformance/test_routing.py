"""The experts of a mixture that a server says it chose (algorithm.router_replay), against Hugging Face's routers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conformance.endpoint import Client, Endpoint, Json
from tests.conformance.engines import sglang_here
from tests.conformance.models import prompt_of
from workers.model.architecture import read_architecture
from workers.rollout.engines.chosen_experts import packed

mixture = pytest.mark.parametrize("engine", ["embedded-glm4moe", "embedded-deepseek", pytest.param("sglang-glm4moe", marks=sglang_here)],
                                  indirect=True)


@torch.no_grad()
def assert_chosen(folder: Path, prompt: list[int], reply: Json) -> set[bytes]:
    """`reply` tells, for all tokens but the last, the experts that transformers' model chooses, but for near ties. Returns which there are."""
    shape, tokens = read_architecture(folder).routing, prompt + reply["output_ids"]
    told = np.frombuffer(packed(reply["meta_info"]["routed_experts"], shape, len(tokens)), shape.dtype)
    told = np.sort(told.reshape(len(tokens) - 1, shape.num_layers, shape.experts_per_token), axis=-1)
    model, chosen = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda _, __, output: chosen.append(output[-1].sort(-1).values))
    model(torch.tensor([tokens[:-1]]))
    same = (told == torch.stack(chosen, 1).numpy()).all((1, 2))
    assert len(same) == len(tokens) - 1 and same.mean() > 0.98
    return {row.tobytes() for row in told}


@mixture
def test_the_experts_of_every_token_but_the_last_are_told(engine: Endpoint) -> None:
    """Those of a prompt that stands in the prefix cache, too, and of a prompt of several chunks."""
    async def scenario(client: Client) -> None:
        prompts, chosen = [prompt_of(1 + 35 * index, index) for index in range(4)], set[bytes]()
        for _ in range(2):
            for prompt, reply in zip(prompts, await asyncio.gather(*(client.generate(prompt, 20, routing=True) for prompt in prompts)), strict=True):
                chosen |= assert_chosen(engine.first, prompt, reply)
        assert reply["meta_info"]["cached_tokens"] > 0 and len(chosen) > 1
        assert "routed_experts" not in (await client.generate(prompts[0], 5))["meta_info"]

    engine.run(scenario)


@mixture
def test_after_new_weights_they_are_those_of_the_keys_and_values_that_are_computed_again(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(40, 3)
        task = client.generate(prompt, 900, routing=True)
        await client.pace(20)
        await client.post("/pause_generation", mode="retract")
        await client.update(engine.second, "second")
        await client.post("/continue_generation")
        await client.pace(20)
        await client.post("/abort_request", abort_all=True)
        reply = await task
        assert len(reply["meta_info"]["weight_versions"]) == 2 and reply["meta_info"]["finish_reason"]["type"] == "abort"
        assert_chosen(engine.second, prompt, reply)

    engine.run(scenario)

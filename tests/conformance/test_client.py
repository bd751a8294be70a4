"""The worker's client and an engine: what it makes of answers, good and bad."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.conformance.endpoint import DEADLINE_S, TOLERANCE, Client, Endpoint
from tests.conformance.models import CONTEXT, EOS, diverged_folder, prompt_of
from workers.messages.parts import Version
from workers.rollout.engines.client import BadRequest, EngineClient, EngineError, SamplingParams

ZERO, ONE = Version(1, 0), Version(1, 1)


def run(engine: Endpoint, scenario: Callable[[EngineClient, Client], Awaitable[None]]) -> None:
    """Run `scenario` with the worker's client, the engine holding `first` as version ZERO."""
    async def body(plain: Client) -> None:
        client = EngineClient(engine.base_url, engine.api_key, DEADLINE_S)
        try:
            await client.update_weights(engine.first, ZERO, flush_cache=True)
            await scenario(client, plain)
        finally:
            await client.close()

    engine.run(body)


async def endless(plain: Client) -> list[int]:
    """A prompt whose most probable answer goes on for long."""
    for start in range(1000):
        prompt = prompt_of(20, start)
        if max((await plain.generate(prompt, 300, temperature=0))["output_ids"]) < EOS:
            return prompt
    raise AssertionError("every answer ends")


def test_a_generation_across_an_update(engine: Endpoint) -> None:
    async def scenario(client: EngineClient, plain: Client) -> None:
        prompt = await endless(plain)
        task = asyncio.create_task(client.generate("a", prompt, SamplingParams(900, 1.0, top_k=1, stop=("never there\n",)), seed=1))
        await plain.pace(5)
        await client.pause("retract")
        await client.update_weights(engine.second, ONE, flush_cache=True)
        await client.resume()
        generation = await task
        assert len(generation.tokens) == len(generation.logprobs) and generation.finish in ("length", "stop")
        (old, start, cut), (new, again, end) = generation.spans
        assert (old, new) == (ZERO, ONE) and start == 0 and cut == again and end == len(generation.tokens)
        for folder, part in ((engine.first, slice(0, cut)), (engine.second, slice(cut, end))):
            reference = engine.logprobs(folder, prompt, generation.tokens).tolist()
            assert max(abs(one - two) for one, two in zip(generation.logprobs[part], reference[part], strict=True)) < TOLERANCE

    run(engine, scenario)


def test_aborted_generations_come_back_whole_and_empty_ones_are_no_error(engine: Endpoint) -> None:
    async def scenario(client: EngineClient, plain: Client) -> None:
        prompt, params = await endless(plain), SamplingParams(900, 0.0)
        running = asyncio.create_task(client.generate("b", prompt, params, seed=1))
        await plain.pace(5)
        await client.pause("abort")
        generation = await running
        assert generation.finish == "abort" and generation.message and len(generation.tokens) == len(generation.logprobs) > 0
        assert generation.spans == [(ZERO, 0, len(generation.tokens))]
        await client.resume()
        queued = asyncio.create_task(client.generate("c", prompt, params, seed=1))
        await plain.pace(5)
        await client.pause("retract")
        await client.pause("abort")
        assert (await queued).tokens == [] == (await queued).logprobs and (await queued).finish == "abort"

    run(engine, scenario)


def test_weights_that_have_diverged_are_an_error(engine: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: EngineClient, plain: Client) -> None:
        await client.update_weights(diverged_folder(engine.first, tmp_path / "nan"), ONE, flush_cache=True)
        with pytest.raises(EngineError, match=r"no numbers under weights .*diverged"):
            await client.generate("d", prompt_of(20), SamplingParams(5, 1.0), seed=1)
        await client.update_weights(engine.second, Version(1, 2), flush_cache=True)
        generation = await client.generate("e", prompt_of(20), SamplingParams(5, 1.0), seed=1)
        reference = engine.logprobs(engine.second, prompt_of(20), generation.tokens).tolist()
        assert max(abs(one - two) for one, two in zip(generation.logprobs, reference, strict=True)) < TOLERANCE

    run(engine, scenario)


def test_wrong_requests_and_a_wrong_key_are_told_from_failures(engine: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: EngineClient, plain: Client) -> None:
        with pytest.raises(BadRequest, match="/generate answered 400"):
            await client.generate("f", [1] * CONTEXT, SamplingParams(20, 1.0), seed=0)
        with pytest.raises(BadRequest, match="/update_weights_from_disk answered 400"):
            await client.update_weights(tmp_path / "gone", ONE, flush_cache=True)
        stranger = EngineClient(engine.base_url, "wrong", DEADLINE_S)
        with pytest.raises(BadRequest, match="/continue_generation answered 401"):
            await stranger.resume()
        await stranger.close()

    run(engine, scenario)

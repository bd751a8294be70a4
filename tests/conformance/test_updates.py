"""Weights from a folder: what serves afterwards, what of the cache is left, and updates that meet requests or each other."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from tests.conformance.endpoint import TOLERANCE, Client, Endpoint
from tests.conformance.models import prompt_of
from tests.conformance.test_generation import every_family
from tests.conformance.test_pauses import LONG, spans


def test_nothing_of_the_old_weights_is_reused(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(70)
        for folder, version in ((engine.first, "a"), (engine.second, "b"), (engine.first, "c")):
            await client.update(folder, version)
            reply = await client.generate(prompt, 6)
            assert reply["meta_info"]["cached_tokens"] == 0 and spans(reply) == [(version, 0, 6)]
            again = await client.generate(prompt, 6)
            assert again["meta_info"]["cached_tokens"] == 69
            assert max(engine.error(folder, prompt, reply), engine.error(folder, prompt, again)) < TOLERANCE
        await client.post("/pause_generation", mode="retract")
        await client.update(engine.second, "d")
        await client.post("/continue_generation")
        reply = await client.generate(prompt, 6)
        assert reply["meta_info"]["cached_tokens"] == 0 and engine.error(engine.second, prompt, reply) < TOLERANCE

    engine.run(scenario)


def test_an_update_without_a_pause_waits_for_the_requests_that_run(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(12)
        task = client.generate(prompt, 150)
        await client.pace(5)
        update = asyncio.create_task(client.update(engine.second, "second"))
        reply = await task
        assert spans(reply) == [("first", 0, 150)] and engine.error(engine.first, prompt, reply) < TOLERANCE
        assert (await update)["num_paused_requests"] == 0
        reply = await client.generate(prompt, 4)
        assert spans(reply) == [("second", 0, 4)] and engine.error(engine.second, prompt, reply) < TOLERANCE

    engine.run(scenario)


def test_updates_outside_a_pause_take_turns(engine: Endpoint) -> None:
    """In a pause, SGLang loses the first one's answer and then hangs; so a client has one under way, never two."""
    async def scenario(client: Client) -> None:
        await asyncio.gather(client.update(engine.second, "a"), client.update(engine.first, "b"), client.update(engine.second, "c"))
        reply = await client.generate(prompt_of(9), 5)
        assert spans(reply) == [("c", 0, 5)] and engine.error(engine.second, prompt_of(9), reply) < TOLERANCE

    engine.run(scenario)


def test_a_folder_that_is_not_there_leaves_the_old_weights_serving(engine: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        task = client.generate(prompt_of(40), 300)
        await client.pace(5)
        await client.post("/pause_generation", mode="retract")
        refused = await client.post("/update_weights_from_disk", 400, model_path=str(tmp_path / "gone"), weight_version="gone")
        assert refused["success"] is False and str(tmp_path / "gone") in refused["message"]
        await client.post("/continue_generation")
        reply = await task
        assert spans(reply) == [("first", 0, 300)] and engine.error(engine.first, prompt_of(40), reply) < TOLERANCE
        assert (await client.request("GET", "/model_info"))["weight_version"] == "first"

    engine.run(scenario)


def test_a_folder_may_be_removed_once_it_is_loaded(engine: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        folder = Path(shutil.copytree(engine.second, tmp_path / "published"))
        await client.update(folder, "second")
        for file in folder.glob("*.safetensors"):
            file.write_bytes(bytes(file.stat().st_size))
        shutil.rmtree(folder)
        reply = await client.generate(prompt_of(25), 30)
        assert engine.error(engine.second, prompt_of(25), reply) < TOLERANCE

    engine.run(scenario)


@every_family
def test_weights_are_exchanged_while_requests_run(engine: Endpoint) -> None:
    """Log-probs are the old weights' before the cut and the new ones' after it, as with a pause. SGLang has no such call, and is asked for none."""
    async def scenario(client: Client) -> None:
        fields = {"model_path": str(engine.second), "weight_version": "second"}
        if engine.kind == "sglang":
            await client.post("/swap_weights", 404, **fields)
            return
        prompts = [prompt_of(20 + 5 * index, index) for index in range(4)]
        tasks = [client.generate(prompt, LONG) for prompt in prompts]
        await client.pace(20)
        assert (await client.post("/swap_weights", **fields))["success"] is True
        await client.pace(20)
        await client.post("/abort_request", abort_all=True)
        for prompt, reply in zip(prompts, await asyncio.gather(*tasks), strict=True):
            (old, start, cut), (new, again, end) = spans(reply)
            assert (old, start, new, again) == ("first", 0, "second", cut) and 0 < cut < end == len(reply["output_ids"])
            assert engine.error(engine.first, prompt, reply, end=cut) < TOLERANCE
            assert engine.error(engine.first, prompt, reply, start=cut) > 0.1  # the two models do differ
            assert engine.error(engine.second, prompt, reply, start=cut) < TOLERANCE

    engine.run(scenario)

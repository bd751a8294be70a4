"""Interruption: what happens to running, retracted and new requests, and which weights sampled which token."""

from __future__ import annotations

import asyncio

from tests.conformance.endpoint import TOLERANCE, Client, Endpoint, Json
from tests.conformance.models import prompt_of
from tests.conformance.test_generation import every_family

LONG = 900


def spans(reply: Json) -> list[tuple[str, int, int]]:
    """The versions of a reply's tokens."""
    return [(span["version"], span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]]


def reason(reply: Json) -> str:
    """Why it ended."""
    return reply["meta_info"]["finish_reason"]["type"]


@every_family
def test_retract_and_update_in_the_middle(engine: Endpoint) -> None:
    """Log-probs are the old weights' before the cut and the new ones' after it, and tokens go on from those before."""
    async def scenario(client: Client) -> None:
        prompts = [prompt_of(20 + 5 * index, index) for index in range(5)]
        tasks = [client.generate(prompt, LONG) for prompt in prompts]
        await client.pace(20)
        await client.post("/pause_generation", mode="retract")
        await client.update(engine.second, "second")
        assert not any(task.done() for task in tasks)
        await client.post("/continue_generation")
        await client.pace(20)
        await client.post("/abort_request", abort_all=True)
        for prompt, reply in zip(prompts, await asyncio.gather(*tasks), strict=True):
            (old, start, cut), (new, again, end) = spans(reply)
            assert (old, start, new, again) == ("first", 0, "second", cut) and 0 < cut < end == len(reply["output_ids"])
            assert reply["meta_info"]["num_retractions"] == 1 and reason(reply) == "abort"
            assert engine.error(engine.first, prompt, reply, end=cut) < TOLERANCE
            assert engine.error(engine.first, prompt, reply, start=cut) > 0.1  # the two models do differ
            assert engine.error(engine.second, prompt, reply, start=cut) < TOLERANCE

    engine.run(scenario)


def test_several_interruptions_are_several_spans(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(16)
        task = client.generate(prompt, LONG)
        folders = [engine.first, engine.second, engine.first]
        for version, folder in enumerate(folders[1:], 1):
            await client.pace(8)
            await client.post("/pause_generation", mode="retract")
            await client.update(folder, f"v{version}")
            await client.post("/continue_generation")
        await client.pace(8)
        await client.post("/abort_request", abort_all=True)
        reply = await task
        assert [version for version, _, _ in spans(reply)] == ["first", "v1", "v2"] and reply["meta_info"]["num_retractions"] == 2
        for folder, (_, start, end) in zip(folders, spans(reply), strict=True):
            assert engine.error(folder, prompt, reply, start, end) < TOLERANCE

    engine.run(scenario)


def test_a_pause_without_an_update_changes_nothing(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        for mode in ("retract", "in_place"):
            task = client.generate(prompt_of(12), 60)
            await client.pace(5)
            await client.post("/pause_generation", mode=mode)
            await client.post("/pause_generation", mode=mode)
            await client.post("/continue_generation")
            reply = await task
            assert spans(reply) == [("first", 0, 60)] and engine.error(engine.first, prompt_of(12), reply) < TOLERANCE

    engine.run(scenario)


def test_in_place_keeps_the_cache(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(30)
        task = client.generate(prompt, LONG)
        await client.pace(20)
        await client.post("/pause_generation", mode="in_place")
        await client.update(engine.second, "second", flush_cache=False)
        await client.post("/continue_generation")
        await client.pace(20)
        await client.post("/abort_request", abort_all=True)
        reply = await task
        (old, _, cut), (new, again, end) = spans(reply)
        assert (old, new, again) == ("first", "second", cut) and end == len(reply["output_ids"]) and reply["meta_info"]["num_retractions"] == 0
        assert engine.error(engine.first, prompt, reply, end=cut) < TOLERANCE
        assert engine.error(engine.second, prompt, reply, start=cut) > TOLERANCE  # new weights on the old ones' keys and values

    engine.run(scenario)


def test_in_place_cannot_flush_but_the_weights_are_new_all_the_same(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        task = client.generate(prompt_of(30), LONG)
        await client.pace(10)
        await client.post("/pause_generation", mode="in_place")
        refused = await client.post("/update_weights_from_disk", 400, model_path=str(engine.second), weight_version="second")
        assert refused["success"] is False and "cache was not flushed" in refused["message"]
        await client.post("/continue_generation")
        await client.pace(10)
        await client.post("/abort_request", abort_all=True)
        assert [version for version, _, _ in spans(await task)] == ["first", "second"]

    engine.run(scenario)


def test_abort_brings_back_what_there_is_and_new_requests_wait(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompts = [prompt_of(10, index) for index in range(5)]
        tasks = [client.generate(prompt, LONG) for prompt in prompts]
        await client.pace(10)
        await client.post("/pause_generation")
        for prompt, reply in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert reason(reply) == "abort" and reply["meta_info"]["finish_reason"]["message"]
            assert 0 < len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < LONG
            assert engine.error(engine.first, prompt, reply) < TOLERANCE
        held = client.generate(prompts[0], 4)
        await client.update(engine.second, "second")
        assert not held.done()
        await client.post("/continue_generation", torch_empty_cache=False)
        assert spans(await held) == [("second", 0, 4)] and engine.error(engine.second, prompts[0], await held) < TOLERANCE

    engine.run(scenario)


def test_what_is_aborted_in_the_queue_has_lost_its_tokens_and_what_waits_at_the_door_stays(engine: Endpoint) -> None:
    """So a client that wants the tokens continues before it aborts."""
    async def scenario(client: Client) -> None:
        task = client.generate(prompt_of(10), LONG)
        await client.pace(10)
        await client.post("/pause_generation", mode="retract")
        held = client.generate(prompt_of(11), 3, rid="held")
        await client.post("/pause_generation", mode="abort")
        reply = await task
        assert reply["output_ids"] == [] == reply["meta_info"]["output_token_logprobs"] and reason(reply) == "abort"
        assert spans(reply) == [("first", 0, 0)]
        await client.post("/abort_request", rid="held")
        await client.post("/continue_generation")
        assert len((await held)["output_ids"]) == 3

    engine.run(scenario)


def test_abort_request_ends_a_request_and_those_whose_id_begins_with_its_id(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        lengths = {"a1": LONG, "a10": LONG, "a2": LONG, "b1": 120}
        tasks = {rid: client.generate(prompt_of(6, index), lengths[rid], rid=rid) for index, rid in enumerate(lengths)}
        await client.pace(10)
        await client.post("/abort_request", rid="a")  # nobody has this id
        await client.post("/abort_request", rid="a1")
        first, tenth = await tasks["a1"], await tasks["a10"]
        assert reason(first) == reason(tenth) == "abort" and first["output_ids"] and first["meta_info"]["id"] == "a1"
        assert not tasks["a2"].done()
        assert reason(await tasks["b1"]) == "length"
        await client.post("/abort_request", abort_all=True)
        assert reason(await tasks["a2"]) == "abort" and engine.error(engine.first, prompt_of(6, 2), await tasks["a2"]) < TOLERANCE

    engine.run(scenario)

"""What a request brings back: tokens, log-probs, why it ended, what it found in the prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.conformance.endpoint import TOLERANCE, Client, Endpoint, Json
from tests.conformance.engines import sglang_here
from tests.conformance.models import CONTEXT, EOS, FAMILIES, SECOND_EOS, VOCAB, prompt_of

ON_SGLANG = [pytest.param(f"sglang-{family}", marks=sglang_here) for family in FAMILIES if family != "deepseek"]
# SGLang 0.5.23 serves latent attention on CPUs with other log-probs than transformers': of GPUs, its usual place, that says nothing.
every_family = pytest.mark.parametrize("engine", [*(f"embedded-{family}" for family in FAMILIES), *ON_SGLANG], indirect=True)


@every_family
def test_logprobs_of_ragged_concurrent_requests(engine: Endpoint) -> None:
    """They are those of the temperature-scaled distribution, before any cut by top-p."""
    async def scenario(client: Client) -> None:
        temperatures = [1.0, 0.7, 1.3]
        prompts = [prompt_of(1 + 9 * index, index) for index in range(14)]
        tasks = [client.generate(prompt, 5 + 7 * (index % 5), temperature=temperatures[index % 3], top_p=1.0 if index % 2 else 0.9)
                 for index, prompt in enumerate(prompts)]
        for index, (prompt, task) in enumerate(zip(prompts, tasks, strict=True)):
            reply = await task
            meta = reply["meta_info"]
            assert len(reply["output_ids"]) == meta["completion_tokens"] == 5 + 7 * (index % 5)
            assert meta["finish_reason"] == {"type": "length", "length": meta["completion_tokens"]}
            assert meta["prompt_tokens"] == len(prompt) and meta["num_retractions"] == 0
            assert meta["weight_version"] == "first"
            assert meta["weight_versions"] == [{"version": "first", "start": 0, "end": len(reply["output_ids"])}]
            assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in reply["output_ids"]]
            assert engine.error(engine.first, prompt, reply, temperature=temperatures[index % 3]) < TOLERANCE

    engine.run(scenario)


def test_greedy_tokens_are_the_most_probable_with_their_untempered_logprobs(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(28, 3)
        for params in ({"temperature": 0}, {"top_k": 1}):
            reply = await client.generate(prompt, 12, **params)
            assert reply["output_ids"] == engine.logits(engine.first, prompt, reply["output_ids"]).argmax(-1).tolist()
            assert engine.error(engine.first, prompt, reply) < TOLERANCE

    engine.run(scenario)


def test_top_p_and_top_k_cut_what_is_sampled_but_not_the_logprobs(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt, temperature = prompt_of(20), 1.2
        top_p, top_k = await asyncio.gather(client.generate(prompt, 200, temperature=temperature, top_p=0.5),
                                            client.generate(prompt, 200, temperature=temperature, top_k=3))
        for reply in (top_p, top_k):
            assert engine.error(engine.first, prompt, reply, temperature=temperature) < TOLERANCE
        ids = torch.tensor(top_k["output_ids"])
        assert bool((engine.logits(engine.first, prompt, ids.tolist()).topk(3).indices == ids[:, None]).any(-1).all())
        ids = torch.tensor(top_p["output_ids"])
        probabilities = (engine.logits(engine.first, prompt, ids.tolist()) / temperature).softmax(-1)
        likelier = torch.where(probabilities > probabilities.gather(1, ids[:, None]), probabilities, 0.0).sum(-1)
        assert float(likelier.max()) < 0.5 + 1e-3 and len(set(ids.tolist())) > 1

    engine.run(scenario)


async def _greedy(client: Client) -> tuple[list[int], list[int], str]:
    """A prompt whose greedy answer of 60 tokens is text with two letters that are not at its beginning: (prompt, answer, letters)."""
    tokenizer = Tokenizer.from_file(str(client.endpoint.first / "tokenizer.json"))
    for start in range(1000):
        prompt = prompt_of(9, start)
        ids = (await client.generate(prompt, 60, temperature=0))["output_ids"]
        text = tokenizer.decode(ids)
        pairs = [text[place : place + 2] for place in range(5, len(text) - 1)]
        pair = next((pair for pair in pairs if pair.isascii() and pair.isalnum() and text.index(pair) >= 5), None)
        if pair and max(ids) < 256 and any(token not in ids[:10] for token in ids[10:20]):
            return prompt, ids, pair
    raise AssertionError("no prompt will do")


def test_stops(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        tokenizer = Tokenizer.from_file(str(engine.first / "tokenizer.json"))
        prompt, ids, pair = await _greedy(client)
        text = tokenizer.decode(ids)

        def again(**more: Any) -> asyncio.Task[Json]:
            return client.generate(prompt, 60, temperature=0, **more)

        assert (await again())["text"] == text
        stopped = await again(stop=["never there", pair])
        assert stopped["text"] == text[: text.index(pair)]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": pair}
        assert stopped["output_ids"] == ids[: len(stopped["output_ids"])] and tokenizer.decode(stopped["output_ids"]).endswith(pair)
        assert len(stopped["meta_info"]["output_token_logprobs"]) == len(stopped["output_ids"])
        token = next(token for token in ids[10:20] if token not in ids[:10])
        stopped = await again(stop_token_ids=[token], ignore_eos=False)
        assert stopped["output_ids"] == ids[: ids.index(token) + 1] and stopped["text"] == tokenizer.decode(ids[: ids.index(token)])
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
        assert (await again(stop_token_ids=[token]))["output_ids"] == ids  # ignore_eos ignores these as well
        late = await again(stop_token_ids=[token], ignore_eos=False, min_new_tokens=40)
        assert len(late["output_ids"]) >= 40 and token not in late["output_ids"][:39]

    engine.run(scenario)


def test_both_ends_of_sequence_end_a_request(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        matched: set[int] = set()
        for start in range(0, 200, 6):
            tasks = [client.generate(prompt_of(9, start + index), 300, ignore_eos=False, temperature=3.0) for index in range(6)]
            for reply in await asyncio.gather(*tasks):
                if reply["meta_info"]["finish_reason"]["type"] == "stop":
                    assert reply["output_ids"][-1] == reply["meta_info"]["finish_reason"]["matched"]
                    matched.add(reply["output_ids"][-1])
            if matched >= {EOS, SECOND_EOS}:
                return
        raise AssertionError(f"only {matched} ended a request")

    engine.run(scenario)


def test_text_instead_of_tokens(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        reply = await client.post("/generate", text="hello", sampling_params={"max_new_tokens": 2, "ignore_eos": True})
        assert reply["meta_info"]["prompt_tokens"] == 5 and len(reply["output_ids"]) == 2
        assert "output_token_logprobs" not in reply["meta_info"]

    engine.run(scenario)


def test_siblings_share_their_prompt_and_a_flush_forgets_it(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(70)
        first = await client.generate(prompt, 6)
        assert first["meta_info"]["cached_tokens"] == 0
        siblings = await asyncio.gather(*(client.generate(prompt, 6) for _ in range(7)))
        assert [sibling["meta_info"]["cached_tokens"] for sibling in siblings] == [69] * 7
        other = prompt[:50] + prompt_of(20, 5)
        cousin = await client.generate(other, 6)
        assert cousin["meta_info"]["cached_tokens"] >= 50 and engine.error(engine.first, other, cousin) < TOLERANCE
        assert max(engine.error(engine.first, prompt, reply) for reply in siblings) < TOLERANCE
        await client.post("/flush_cache")
        assert (await client.generate(prompt, 2))["meta_info"]["cached_tokens"] == 0
        running = client.generate(prompt, 900)
        await client.pace(5)
        await client.post("/flush_cache", 400)
        await client.post("/abort_request", abort_all=True)
        assert engine.error(engine.first, prompt, await running) < TOLERANCE

    engine.run(scenario)


@pytest.mark.parametrize("body", [
    {"input_ids": [1], "sampling_params": {"temperature": -1}},
    {"input_ids": [1], "sampling_params": {"top_p": 0}},
    {"input_ids": [1], "sampling_params": {"top_k": 0}},
    {"input_ids": [1], "sampling_params": {"min_new_tokens": 500}},
    {"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}},
    {"input_ids": [1], "sampling_params": {"max_tokens": 8}},
    {"input_ids": []},
    {"input_ids": "one"},
    {},
    {"input_ids": [1] * (CONTEXT + 1), "sampling_params": {"max_new_tokens": 1}},
    {"input_ids": [1] * 1000, "sampling_params": {"max_new_tokens": 25}},
])
def test_requests_that_cannot_be_served_are_refused(engine: Endpoint, body: Json) -> None:
    async def scenario(client: Client) -> None:
        await client.post("/generate", 400, **body)
        # SGLang gives two tokens less than would fit.
        full = await client.post("/generate", input_ids=[1] * 1000, sampling_params={"max_new_tokens": 22, "ignore_eos": True})
        assert len(full["output_ids"]) == 22

    engine.run(scenario)


def test_a_request_id_is_used_once_at_a_time(engine: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        task = client.generate([1], 900, rid="same")
        await client.pace(5)
        await client.post("/generate", 400, input_ids=[1], rid="same")
        await client.post("/abort_request", rid="same")
        assert len((await task)["output_ids"]) < 900
        assert (await client.generate([1], 2, rid="same"))["meta_info"]["id"] == "same"

    engine.run(scenario)


def test_ids_up_to_the_last_of_the_vocabulary_are_taken(engine: Endpoint) -> None:
    """What is beyond ends SGLang as a whole: the client sends no such ids."""
    async def scenario(client: Client) -> None:
        prompt = [0, VOCAB - 1, EOS, SECOND_EOS]
        assert engine.error(engine.first, prompt, await client.generate(prompt, 4)) < TOLERANCE

    engine.run(scenario)

"""The engine's HTTP API, over real HTTP to a real child process, against Hugging Face's forward on the same weights.

The tests know the engine by `Endpoint` only (address, key, model folders); a fixture starts it, so that another server of
this API can take its place. They poll GET /server_info for the number of generated tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from benchmarks.engine_child import ROOT, EngineChild

VOCAB, EOS, SECOND_EOS = 260, 256, 257
CONTEXT = 1024
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "eos_token_id": EOS, "bos_token_id": None}
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True)),
}
TOLERANCE = 1e-4
DEADLINE_S = 60.0

Json = dict[str, Any]


def write_model(folder: Path, family: str, seed: int) -> Path:
    """A small random model whose distributions are far from uniform, with a tokenizer of 256 bytes and two specials."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.copy_((1 if "norm" in name else 0) + 0.3 * torch.randn_like(tensor))
            else:
                tensor.mul_(4)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, SECOND_EOS]}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass
class Endpoint:
    """A running engine and the models it may serve: `first` at the start, `second` for updates."""

    base_url: str
    api_key: str
    first: Path
    second: Path
    pid: int
    _models: dict[Path, Any] = field(default_factory=dict)

    def run(self, scenario: Callable[[Client], Awaitable[None]]) -> None:
        """Run `scenario` with a client; before it, bring the engine back to a known state."""
        async def body() -> None:
            headers = {"Authorization": f"Bearer {self.api_key}"}
            async with aiohttp.ClientSession(self.base_url, headers=headers, connector=aiohttp.TCPConnector(limit=0)) as session:
                client = Client(self, session)
                await client.post("/abort_request", abort_all=True)
                await client.post("/continue_generation")
                await client.update(self.first, "first")
                await scenario(client)

        asyncio.run(asyncio.wait_for(body(), DEADLINE_S))

    def logprobs(self, folder: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Reference log-probs of `output` after `prompt`, float32 [len(output)]."""
        if folder not in self._models:
            self._models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([prompt + output])
        with torch.no_grad():
            logits = self._models[folder](ids).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]

    def error(self, folder: Path, prompt: list[int], reply: Json, start: int = 0, end: int | None = None,
              temperature: float = 1.0) -> float:
        """Largest difference between reported and reference log-probs over output tokens [start, end)."""
        reported = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        reference = self.logprobs(folder, prompt, reply["output_ids"], temperature)
        return float((reported - reference).abs()[start:end].max())


@dataclass
class Client:
    """Requests to an endpoint."""

    endpoint: Endpoint
    session: aiohttp.ClientSession

    async def request(self, method: str, path: str, status: int = 200, **body: Any) -> Json:
        """A JSON reply; fails unless it has `status`."""
        async with self.session.request(method, path, json=body or None) as reply:
            text = await reply.text()
            assert reply.status == status, f"{path} {body}: {reply.status} {text}"
            return json.loads(text)

    async def post(self, path: str, status: int = 200, **body: Any) -> Json:
        """POST."""
        return await self.request("POST", path, status, **body)

    def generate(self, prompt: list[int], count: int, rid: str | None = None, **params: Any) -> asyncio.Task[Json]:
        """Start generating `count` tokens without an early end."""
        sampling = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True} | params
        body: Json = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        if rid is not None:
            body["rid"] = rid
        return asyncio.create_task(self.post("/generate", **body))

    async def info(self) -> Json:
        """Counters."""
        return await self.request("GET", "/server_info")

    async def until(self, condition: Callable[[Json], bool]) -> Json:
        """Poll the counters until `condition` holds (the scenario as a whole has a deadline)."""
        while not condition(info := await self.info()):
            await asyncio.sleep(0)
        return info

    async def update(self, folder: Path, version: str, **more: Any) -> Json:
        """Load weights."""
        reply = await self.post("/update_weights_from_disk", model_path=str(folder), weight_version=version, **more)
        assert reply["success"] is True
        return reply


def prompt_of(length: int, start: int = 0) -> list[int]:
    """A prompt that differs from others with another `start` from its first token on."""
    return [(start * 31 + index * index * 7 + index) % 256 for index in range(length)]


def start_engine(folder: Path, **options: Any) -> EngineChild:
    """An engine with 8 slots."""
    defaults = {"num_slots": 8, "context_length": CONTEXT, "prefill_chunk": 32, "weight_version": "first"}
    return EngineChild.start(folder, **(defaults | options))


@pytest.fixture(scope="module", params=list(FAMILIES))
def endpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """An engine serving a model of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    first, second = (write_model(folder / name, request.param, seed) for seed, name in enumerate(("first", "second")))
    with start_engine(first) as child:
        yield Endpoint(child.base_url, child.api_key, first, second, child.process.pid)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """An engine of one family, for what does not depend on the model."""
    folder = tmp_path_factory.mktemp("one")
    first, second = (write_model(folder / name, "llama", seed) for seed, name in enumerate(("first", "second")))
    with start_engine(first) as child:
        yield Endpoint(child.base_url, child.api_key, first, second, child.process.pid)


def test_logprobs_of_ragged_concurrent_requests(endpoint: Endpoint) -> None:
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
            assert endpoint.error(endpoint.first, prompt, reply, temperature=temperatures[index % 3]) < TOLERANCE
        greedy = await client.generate(prompts[3], 12, temperature=0)
        for position, token in enumerate(greedy["output_ids"]):
            head = greedy["output_ids"][:position]
            scores = [float(endpoint.logprobs(endpoint.first, prompts[3], [*head, other])[-1]) for other in (token, (token + 1) % VOCAB, 7)]
            assert scores[0] == max(scores)
        assert endpoint.error(endpoint.first, prompts[3], greedy) < TOLERANCE

    endpoint.run(scenario)


def test_retract_and_update_in_the_middle(endpoint: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        prompts = [prompt_of(20 + 5 * index, index) for index in range(10)]  # two of them queue
        tasks = [client.generate(prompt, 300) for prompt in prompts]
        await client.until(lambda info: info["generated_tokens"] > base + 200)
        await client.post("/pause_generation", mode="retract")
        still = await client.info()
        assert still["paused"] and still["num_running"] == 0 and still["num_queued"] == 10
        await client.update(endpoint.second, "second")
        assert (await client.info())["generated_tokens"] == still["generated_tokens"]
        await client.post("/continue_generation")
        cuts = []
        for prompt, task in zip(prompts, tasks, strict=True):
            reply = await task
            meta = reply["meta_info"]
            spans = meta["weight_versions"]
            cut = spans[0]["end"] if spans[0]["version"] == "first" else 0
            assert [span["version"] for span in spans] == (["first", "second"] if cut else ["second"])
            assert spans[-1]["end"] == 300 and meta["num_retractions"] == (1 if cut else meta["num_retractions"])
            cuts.append(cut)
            if cut:
                assert spans[1]["start"] == cut
                assert endpoint.error(endpoint.first, prompt, reply, end=cut) < TOLERANCE
                assert endpoint.error(endpoint.first, prompt, reply, start=cut) > 0.1  # the two models do differ
            assert endpoint.error(endpoint.second, prompt, reply, start=cut) < TOLERANCE
        assert sum(cut > 0 for cut in cuts) == 8 and max(cuts) < 300

    endpoint.run(scenario)


def test_in_place_keeps_the_cache(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        prompt = prompt_of(30)
        task = client.generate(prompt, 600)
        await client.until(lambda info: info["generated_tokens"] > base + 50)
        await client.post("/pause_generation", mode="in_place")
        refused = await client.post("/update_weights_from_disk", 400, model_path=str(one.second), weight_version="second")
        assert refused["success"] is False and "flush_cache=false" in refused["message"]
        reply = await client.update(one.second, "second", flush_cache=False)
        assert reply["num_paused_requests"] == 1
        prefilled = (await client.info())["prefill_tokens"]
        await client.post("/continue_generation")
        await client.until(lambda info: info["generated_tokens"] > base + 60)
        fresh = await client.generate(prompt, 20)  # must not reuse the old weights' prefix
        assert fresh["meta_info"]["cached_tokens"] == 0 and one.error(one.second, prompt, fresh) < TOLERANCE
        done = await task
        assert (await client.info())["prefill_tokens"] == prefilled + 29  # the fresh request's only
        first, second = done["meta_info"]["weight_versions"]
        assert (first["version"], second["version"], second["start"], second["end"]) == ("first", "second", first["end"], 600)
        assert one.error(one.first, prompt, done, end=first["end"]) < TOLERANCE
        assert done["meta_info"]["num_retractions"] == 0

    one.run(scenario)


def test_pause_by_abort_returns_partial_results_and_holds_new_requests(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        tasks = [client.generate(prompt_of(10, index), 900) for index in range(10)]
        await client.until(lambda info: info["generated_tokens"] > base + 40 and info["num_queued"] == 2)
        await client.post("/pause_generation")
        for index, reply in enumerate(await asyncio.gather(*tasks)):
            assert reply["meta_info"]["finish_reason"]["type"] == "abort" and reply["meta_info"]["finish_reason"]["message"]
            assert len(reply["output_ids"]) == reply["meta_info"]["completion_tokens"] < 900
            if reply["output_ids"]:
                assert one.error(one.first, prompt_of(10, index), reply) < TOLERANCE
        held = client.generate(prompt_of(5), 4)
        await client.until(lambda info: info["num_queued"] == 1)
        assert not held.done()
        await client.post("/continue_generation", torch_empty_cache=False)
        assert (await held)["meta_info"]["finish_reason"]["type"] == "length"

    one.run(scenario)


def test_abort_request_matches_the_start_of_the_id(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        lengths = {"a1": 900, "a2": 900, "b1": 60}
        tasks = {rid: client.generate(prompt_of(6, index), lengths[rid], rid=rid) for index, rid in enumerate(lengths)}
        await client.until(lambda info: info["generated_tokens"] > base + 20)
        await client.post("/abort_request", rid="a")
        replies = {rid: await task for rid, task in tasks.items()}
        reasons = {rid: reply["meta_info"]["finish_reason"]["type"] for rid, reply in replies.items()}
        assert reasons == {"a1": "abort", "a2": "abort", "b1": "length"}
        assert replies["a1"]["meta_info"]["id"] == "a1"
        await client.post("/abort_request", rid="gone")
        refused = await client.post("/abort_request", 400)
        assert "rid=''" in refused["error"]["message"]

    one.run(scenario)


def test_prefixes_are_reused_and_exact_after_an_update(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(70)
        for folder, version in ((one.first, "first"), (one.second, "second")):
            await client.update(folder, version)
            before = await client.info()
            replies = await asyncio.gather(*(client.generate(prompt, 6) for _ in range(8)))
            after = await client.info()
            assert sorted(reply["meta_info"]["cached_tokens"] for reply in replies) == [0] + [69] * 7
            assert after["prefill_tokens"] - before["prefill_tokens"] == 69 and after["cached_tokens"] - before["cached_tokens"] == 7 * 69
            other = prompt[:50] + prompt_of(20, 5)
            reply = await client.generate(other, 6)
            assert reply["meta_info"]["cached_tokens"] >= 50 and one.error(folder, other, reply) < TOLERANCE
            assert max(one.error(folder, prompt, reply) for reply in replies) < TOLERANCE
        await client.post("/flush_cache")
        assert (await client.generate(prompt, 2))["meta_info"]["cached_tokens"] == 0

    one.run(scenario)


def test_an_update_without_a_pause_interrupts_between_steps(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        prompt = prompt_of(12)
        task = client.generate(prompt, 700)
        await client.until(lambda info: info["generated_tokens"] > base + 30)
        assert (await client.update(one.second, "second"))["num_paused_requests"] == 1
        reply = await task
        cut = reply["meta_info"]["weight_versions"][0]["end"]
        assert one.error(one.first, prompt, reply, end=cut) < TOLERANCE and one.error(one.second, prompt, reply, start=cut) < TOLERANCE

    one.run(scenario)


def test_a_seed_fixes_the_tokens_whatever_the_batch(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        prompt = prompt_of(15)
        alone = await client.generate(prompt, 30, sampling_seed=5)
        tasks = [client.generate(prompt_of(8 + index, index), 40) for index in range(5)]
        seeded = await client.generate(prompt, 30, sampling_seed=5)
        other = await client.generate(prompt, 30, sampling_seed=6)
        await asyncio.gather(*tasks)
        assert alone["output_ids"] == seeded["output_ids"] != other["output_ids"]

    one.run(scenario)


def test_stops(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        tokenizer = Tokenizer.from_file(str(one.first / "tokenizer.json"))
        prompt = prompt_of(9)
        for seed in range(1000):
            free = await client.generate(prompt, 60, sampling_seed=seed)
            ids, text = free["output_ids"], tokenizer.decode(free["output_ids"])
            pairs = [text[index : index + 2] for index in range(5, len(text) - 1) if text[index : index + 2].isascii()]
            pairs = [pair for pair in pairs if pair.isalnum()]
            if pairs and max(ids) < 256:
                break
        assert free["text"] == text

        def again(**more: Any) -> asyncio.Task[Json]:
            return client.generate(prompt, 60, sampling_seed=seed, **more)

        stopped = await again(stop=["never there", pairs[0]])
        assert stopped["text"] == text[: text.index(pairs[0])]
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": pairs[0]}
        assert stopped["output_ids"] == ids[: len(stopped["output_ids"])] and tokenizer.decode(stopped["output_ids"]).endswith(pairs[0])
        token = ids[20]
        stopped = await again(stop_token_ids=[token])
        assert stopped["output_ids"] == ids[: ids.index(token) + 1] and stopped["text"] == tokenizer.decode(ids[: ids.index(token)])
        assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": token}
        late = await again(stop_token_ids=[token], min_new_tokens=40)
        assert len(late["output_ids"]) >= 40 and token not in late["output_ids"][:39]
        fromtext = await client.post("/generate", text="hello", sampling_params={"max_new_tokens": 2})
        assert fromtext["meta_info"]["prompt_tokens"] == 5
        matched: set[int] = set()
        for seed in range(200):  # until both ends of sequence have been seen
            reply = await client.generate(prompt_of(9, seed), 400, ignore_eos=False, temperature=3.0, sampling_seed=seed)
            if reply["meta_info"]["finish_reason"]["type"] == "stop":
                assert reply["output_ids"][-1] == reply["meta_info"]["finish_reason"]["matched"]
                matched.add(reply["output_ids"][-1])
            if matched >= {EOS, SECOND_EOS}:
                break
        assert matched == {EOS, SECOND_EOS}

    one.run(scenario)


@pytest.mark.parametrize(("body", "word"), [
    ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature=-1.0"),
    ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p=0.0"),
    ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k=0"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0"),
    ({"input_ids": [1], "sampling_params": {"min_new_tokens": 500}}, "min_new_tokens=500"),
    ({"input_ids": [1], "sampling_params": {"max_new_tokens": "8"}}, "max_new_tokens"),
    ({"input_ids": [1], "sampling_params": {"max_tokens": 8}}, "max_tokens"),
    ({"input_ids": [1], "sampling_params": {"n": 2}}, "n=2"),
    ({"input_ids": [1], "sampling_params": {"min_p": 0.1}}, "min_p=0.1"),
    ({"input_ids": [1], "sampling_params": {"stop": ""}}, "stop=''"),
    ({"input_ids": [1], "sampling_params": {"stop": ["a", ""]}}, "stop="),
    ({"input_ids": [1], "sampling_params": {"stop_token_ids": [VOCAB]}}, f"stop_token_ids holds {VOCAB}"),
    ({"input_ids": [1, VOCAB]}, f"input_ids holds {VOCAB}"),
    ({"input_ids": [1, -1]}, "input_ids holds -1"),
    ({"input_ids": []}, "input_ids=[]"),
    ({"input_ids": [[1]]}, "input_ids"),
    ({}, "exactly one"),
    ({"input_ids": [1], "text": "a"}, "exactly one"),
    ({"input_ids": [1] * CONTEXT}, f"{CONTEXT} + 128"),
    ({"input_ids": [1], "stream": True}, "stream=True"),
    ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num=2"),
    ({"input_ids": [1], "surprise": 1}, "surprise"),
])
def test_bad_requests_are_refused(one: Endpoint, body: Json, word: str) -> None:
    async def scenario(client: Client) -> None:
        refused = await client.post("/generate", 400, **body)
        assert word in refused["error"]["message"]
        assert (await client.info())["num_running"] == 0

    one.run(scenario)


def test_other_bad_requests_are_refused(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        await client.post("/pause_generation", 400, mode="stop")
        await client.post("/pause_generation", 400, modus="abort")
        await client.post("/update_weights_from_disk", 400, weight_version="x")
        await client.post("/update_weights_from_disk", 400, model_path=str(one.first), load_format="pickle")
        async with client.session.post("/generate", data=b"{") as reply:
            assert reply.status == 400
        async with client.session.post("/nothing") as reply:
            assert reply.status == 404
        base = (await client.info())["generated_tokens"]
        task = client.generate([1], 300, rid="same")
        await client.until(lambda info: info["generated_tokens"] > base)
        await client.post("/generate", 400, input_ids=[1], rid="same")
        assert len((await task)["output_ids"]) == 300

    one.run(scenario)


@pytest.mark.parametrize("key", [None, "Bearer ", "Bearer wrong", "Bearer wröng"])
def test_every_endpoint_asks_for_the_key(one: Endpoint, key: str | None) -> None:
    async def scenario(client: Client) -> None:
        headers = {} if key is None else {"Authorization": key}
        async with aiohttp.ClientSession(one.base_url, headers=headers) as session:
            for path in ("/generate", "/pause_generation", "/continue_generation", "/abort_request", "/update_weights_from_disk",
                         "/flush_cache"):
                async with session.post(path, json={}) as reply:
                    assert reply.status == 401
            for path in ("/health", "/model_info", "/get_model_info", "/server_info", "/flush_cache"):
                async with session.get(path) as reply:
                    assert reply.status == 401

    one.run(scenario)


def test_information(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        await client.request("GET", "/health")
        for path in ("/model_info", "/get_model_info"):
            info = await client.request("GET", path)
            assert info["model_path"] == str(one.first) and info["weight_version"] == "first"
        arguments = Path(f"/proc/{one.pid}/cmdline").read_text()
        assert one.api_key not in arguments

    one.run(scenario)


def broken_folders(first: Path, work: Path) -> dict[str, Path]:
    """Copies of a model, each with one fault."""
    folders = {name: work / name for name in ("missing", "shape", "short", "type", "config", "nothing")}
    for name, folder in folders.items():
        if name != "nothing":
            shutil.copytree(first, folder)
    tensors = load_file(first / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, folders["missing"] / "model.safetensors")
    save_file(tensors | {name: tensors[name][:5].clone()}, folders["shape"] / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.int32)}, folders["type"] / "model.safetensors")
    whole = (first / "model.safetensors").read_bytes()
    (folders["short"] / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    config = json.loads((first / "config.json").read_text())
    (folders["config"] / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return folders


def test_a_failing_update_leaves_the_old_weights_serving(one: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        base = (await client.info())["generated_tokens"]
        prompt = prompt_of(40)
        task = client.generate(prompt, 800)
        await client.until(lambda info: info["generated_tokens"] > base + 20)
        for folder in broken_folders(one.first, tmp_path).values():
            refused = await client.post("/update_weights_from_disk", 400, model_path=str(folder), weight_version="broken")
            assert refused["success"] is False and str(folder) in refused["message"]
        reply = await task
        assert reply["meta_info"]["weight_versions"] == [{"version": "first", "start": 0, "end": 800}]
        assert reply["meta_info"]["num_retractions"] == 0
        assert one.error(one.first, prompt, reply) < TOLERANCE

    one.run(scenario)


def test_diverged_weights_abort_requests_and_good_ones_mend_it(one: Endpoint, tmp_path: Path) -> None:
    async def scenario(client: Client) -> None:
        shutil.copytree(one.first, tmp_path / "nan")
        tensors = load_file(one.first / "model.safetensors")
        save_file({key: torch.full_like(value, torch.nan) for key, value in tensors.items()}, tmp_path / "nan" / "model.safetensors")
        await client.update(tmp_path / "nan", "nan")
        for reply in await asyncio.gather(*(client.generate(prompt_of(40, index), 5) for index in range(3))):
            assert reply["meta_info"]["finish_reason"]["type"] == "abort" and reply["output_ids"] == []
            assert reply["meta_info"]["weight_version"] == "nan" and reply["meta_info"]["weight_versions"] == []
        await client.update(one.second, "second")
        reply = await client.generate(prompt_of(10), 30)
        assert one.error(one.second, prompt_of(10), reply) < TOLERANCE

    one.run(scenario)


def test_a_client_that_leaves_frees_its_slot(one: Endpoint) -> None:
    async def scenario(client: Client) -> None:
        tasks = [client.generate(prompt_of(5, index), 1000) for index in range(9)]
        await client.until(lambda info: info["num_running"] == 8 and info["num_queued"] == 1)
        for task in tasks:
            task.cancel()
        await client.until(lambda info: info["num_running"] == 0 and info["num_queued"] == 0)
        assert len((await client.generate(prompt_of(5), 3))["output_ids"]) == 3

    one.run(scenario)


def is_gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_gone(pid: int, seconds: float) -> bool:
    """Poll until the process has ended."""
    deadline = time.monotonic() + seconds
    while not is_gone(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_the_engine_dies_with_its_parent(one: Endpoint) -> None:
    code = ("import sys; from pathlib import Path; from benchmarks.engine_child import EngineChild\n"
            "child = EngineChild.start(Path(sys.argv[1]), num_slots=1); print(child.process.pid, flush=True); sys.stdin.read()")
    parent = subprocess.Popen([sys.executable, "-c", code, str(one.first)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert not is_gone(pid)
    parent.kill()
    parent.communicate()
    assert wait_gone(pid, 5)


def test_sigterm_ends_a_busy_engine_at_once(one: Endpoint) -> None:
    child = start_engine(one.first)
    busy = Endpoint(child.base_url, child.api_key, one.first, one.second, child.process.pid)

    async def scenario(client: Client) -> None:
        task = client.generate(prompt_of(5), 1000)
        await client.until(lambda info: info["generated_tokens"] > 10)
        child.process.send_signal(signal.SIGTERM)
        with pytest.raises(aiohttp.ClientError):
            await task

    busy.run(scenario)
    start = time.monotonic()
    child.stop()
    assert time.monotonic() - start < 1 and child.process.returncode == -signal.SIGTERM


def test_a_failure_in_the_engine_ends_the_process(one: Endpoint) -> None:
    code = ("import runpy, torch; from workers.rollout.servers.embedded.model import Model\n"
            "def decode(self, ids, positions): raise ArithmeticError('injected fault')\n"
            "Model.decode = decode; runpy.run_module('workers.rollout.servers.embedded', run_name='__main__')")
    process = subprocess.Popen([sys.executable, "-c", code, "--model-path", str(one.first), "--parent-pid", str(os.getpid())], cwd=ROOT,
                               env=os.environ | {"OMP_NUM_THREADS": "1", "HEADWAY_ENGINE_API_KEY": "key"}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = json.loads(process.stdout.readline())["port"]

    async def scenario() -> None:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Authorization": "Bearer key"}) as session:
            with pytest.raises(aiohttp.ClientError):
                await session.post("/generate", json={"input_ids": [1], "sampling_params": {"max_new_tokens": 2}})

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1 and "injected fault" in errors


def test_an_engine_that_cannot_start_says_why(one: Endpoint, tmp_path: Path) -> None:
    for folder, options, word in ((tmp_path / "none", {}, "config.json"), (one.first, {"context_length": 5000}, "5000"),
                                  (one.first, {"num_slots": 0}, "num-slots")):
        with pytest.raises(RuntimeError, match=word):
            start_engine(folder, **options)
    environment = {key: value for key, value in os.environ.items() if key != "HEADWAY_ENGINE_API_KEY"}
    command = [sys.executable, "-m", "workers.rollout.servers.embedded", "--model-path", str(one.first), "--parent-pid"]
    for pid, word in ((os.getpid(), "HEADWAY_ENGINE_API_KEY"), (os.getpid() + 1, "parent")):
        ended = subprocess.run([*command, str(pid)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert ended.returncode != 0 and word in ended.stderr

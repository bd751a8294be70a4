"""A running engine as the tests know it: an address, a key, two folders of weights, and Hugging Face's forward on these."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from tests.conformance.models import prompt_of

TOLERANCE = 1e-4
DEADLINE_S = 120.0

Json = dict[str, Any]


@dataclass
class Endpoint:
    """An engine of `kind` and the models it may serve: `first` at the start, `second` for updates."""

    kind: str
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
                await client.post("/continue_generation")
                await client.post("/abort_request", abort_all=True)
                await client.update(self.first, "first")
                await scenario(client)

        asyncio.run(asyncio.wait_for(body(), DEADLINE_S))

    def logprobs(self, folder: Path, prompt: list[int], output: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Reference log-probs of `output` after `prompt`, float32 [len(output)]."""
        ids = torch.tensor([prompt + output])
        return torch.log_softmax(self.logits(folder, prompt, output) / temperature, -1).gather(1, ids[0, len(prompt):, None])[:, 0]

    def logits(self, folder: Path, prompt: list[int], output: list[int]) -> torch.Tensor:
        """What each token of `output` was sampled from, float32 [len(output), vocabulary]."""
        if folder not in self._models:
            self._models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            return self._models[folder](torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1].float()

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
        """A reply; fails unless it has `status`. What is no JSON comes as {"text": ...}."""
        async with self.session.request(method, path, json=body or None) as reply:
            text = await reply.text()
            assert reply.status == status, f"{path} {body}: {reply.status} {text}"
            return json.loads(text) if reply.content_type == "application/json" and text else {"text": text}

    async def post(self, path: str, status: int = 200, **body: Any) -> Json:
        """POST. An empty object where there are no fields: SGLang wants a body."""
        async with self.session.post(path, json=body) as reply:
            text = await reply.text()
            assert reply.status == status, f"{path} {body}: {reply.status} {text}"
            return json.loads(text) if reply.content_type == "application/json" and text else {"text": text}

    def generate(self, prompt: list[int], count: int, rid: str | None = None, routing: bool = False, **params: Any) -> asyncio.Task[Json]:
        """Start generating `count` tokens without an early end."""
        sampling = {"max_new_tokens": count, "temperature": 1.0, "ignore_eos": True} | params
        body: Json = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        if routing:
            body["return_routed_experts"] = True
        if rid is not None:
            body["rid"] = rid
        return asyncio.create_task(self.post("/generate", **body))

    async def pace(self, count: int) -> None:
        """Wait until every request that runs has about `count` tokens more: those of one that is sent now."""
        await self.generate(prompt_of(3, 77), count)

    async def info(self) -> Json:
        """Counters of the embedded engine."""
        return await self.request("GET", "/server_info")

    async def until(self, condition: Callable[[Json], bool]) -> Json:
        """Poll the embedded engine's counters until `condition` holds (the scenario as a whole has a deadline)."""
        while not condition(info := await self.info()):
            await asyncio.sleep(0)
        return info

    async def update(self, folder: Path, version: str, **more: Any) -> Json:
        """Load weights."""
        reply = await self.post("/update_weights_from_disk", model_path=str(folder), weight_version=version, **more)
        assert reply["success"] is True
        return reply

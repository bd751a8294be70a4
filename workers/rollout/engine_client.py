"""Client of SGLang's HTTP API: the calls that Headway makes, with deadlines. Works with every server in servers/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import aiohttp

from workers.messages.types import Version


class EngineError(RuntimeError):
    """The engine answered with an error, or not at all."""


class BadRequest(EngineError):
    """The engine refused the request as wrong (HTTP 4xx): trying again cannot help."""


@dataclass(frozen=True)
class SamplingParams:
    """What a generate request asks for; names as in SGLang's API."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generation:
    """The answer to one generate request: tokens, log-probs, and [start, end) spans of the versions that sampled them."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[Version, int, int]]
    finish: str
    message: str = ""


class EngineClient:
    """Asynchronous; one connection pool for all requests of a worker."""

    def __init__(self, url: str, api_key: str, request_timeout_s: float) -> None:
        self._url = url
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"}, timeout=aiohttp.ClientTimeout(total=request_timeout_s),
            connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Close all connections; the server aborts what they were waiting for."""
        await self._session.close()

    async def generate(self, rid: str, prompt: list[int], params: SamplingParams, seed: int) -> Generation:
        """POST /generate. Raises `BadRequest` or `EngineError`."""
        answer = await self._post("/generate", {
            "rid": rid, "input_ids": prompt, "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
                "top_k": params.top_k, "stop": list(params.stop), "sampling_seed": seed}})
        meta = answer["meta_info"]
        spans = [(Version.parse(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
        return Generation(answer["output_ids"], [entry[0] for entry in meta["output_token_logprobs"]], spans,
                          meta["finish_reason"]["type"], str(meta["finish_reason"].get("message", "")))

    async def pause(self, mode: str) -> None:
        """POST /pause_generation: when it returns, nothing is computed any more."""
        await self._post("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """POST /continue_generation."""
        await self._post("/continue_generation", {})

    async def update_weights(self, folder: Path, version: Version, flush_cache: bool) -> None:
        """POST /update_weights_from_disk."""
        await self._post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush_cache})

    async def _post(self, path: str, body: dict) -> dict:
        return await self._call("POST", path, body)

    async def _call(self, method: str, path: str, body: dict | None) -> dict:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                if response.status >= 400:
                    kind = BadRequest if response.status < 500 else EngineError
                    raise kind(f"engine: {path} answered {response.status}: {(await response.text())[:2000]}")
                return await response.json() if response.content_type == "application/json" else {}
        except (TimeoutError, aiohttp.ClientError) as error:
            raise EngineError(f"engine: {path} failed: {str(error) or type(error).__name__}") from error

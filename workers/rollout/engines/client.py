"""Client of SGLang's HTTP API: the calls that Headway makes, with deadlines. Works with every server in servers/."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import aiohttp

from workers.config import RoutingShape
from workers.messages.parts import Version
from workers.rollout.engines.chosen_experts import RoutingError, packed


class EngineError(RuntimeError):
    """The engine answered with an error, or not at all."""


class BadRequest(EngineError):
    """The engine refused the request as wrong (HTTP 4xx): trying again cannot help."""


class NoAnswer(EngineError):
    """The engine did not answer: it is gone, or hangs, or took longer than it may."""


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
    """The answer to one generate request: tokens, log-probs, and [start, end) spans of the versions that sampled them. `routing`: of all tokens but
    the last, those of the prompt too (`packed`), where it was asked for and there is a token."""

    tokens: list[int]
    logprobs: list[float]
    spans: list[tuple[Version, int, int]]
    finish: str
    message: str = ""
    routing: bytes = b""


@dataclass(frozen=True)
class GroupPlace:
    """A server's place in a weight-update group: the group's name, where its store is, torch's backend, its first rank, and how many all have."""

    group: str
    address: str
    port: int
    backend: str
    first_rank: int
    num_ranks: int


@dataclass(frozen=True)
class Bucket:
    """Tensors that are broadcast in one flat run of bytes through `group`; `dtype` as torch names it. `starts`: where slices lie in their tensors,
    None where all are whole; the embedded engine alone takes slices."""

    group: str
    names: list[str]
    shapes: list[list[int]]
    dtype: str
    starts: list[list[int]] | None


class EngineClient:
    """Asynchronous; one connection pool for all requests to a server. `timeout_s` of a call: None for `request_timeout_s`."""

    def __init__(self, url: str, api_key: str, request_timeout_s: float) -> None:
        self._url, self._request_timeout_s = url, request_timeout_s
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        """Close all connections; the server aborts what they were waiting for."""
        await self._session.close()

    async def generate(self, rid: str, prompt: list[int], params: SamplingParams, seed: int, routing: RoutingShape | None = None) -> Generation:
        """POST /generate, for `routing` too. Raises `BadRequest` or `EngineError`, the latter too where the weights that served give no log-probs,
        or the experts that were chosen are not told."""
        answer = await self._post("/generate", {
            "rid": rid, "input_ids": prompt, "return_logprob": True, **({"return_routed_experts": True} if routing else {}),
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens, "temperature": params.temperature, "top_p": params.top_p,
                "top_k": params.top_k, "stop": list(params.stop), "sampling_seed": seed}})
        meta = answer["meta_info"]
        spans = [(Version.parse(span["version"]), span["start"], span["end"]) for span in meta["weight_versions"]]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        if None in logprobs:  # how JSON writes what is no number
            raise EngineError(f"engine: log-probs that are no numbers under weights {spans[-1][0]}: logits must be finite. The weights have "
                              "diverged: go on from an earlier checkpoint with a lower learning rate")
        tokens, chosen = answer["output_ids"], b""
        if routing is not None and tokens:
            try:
                chosen = packed(meta.get("routed_experts"), routing, len(prompt) + len(tokens))
            except RoutingError as error:
                if meta["finish_reason"]["type"] != "abort":  # what was aborted before all of it was computed has none, and is gone on with
                    raise EngineError(str(error)) from error
        return Generation(tokens, logprobs, spans, meta["finish_reason"]["type"], str(meta["finish_reason"].get("message", "")), chosen)

    async def pause(self, mode: str, timeout_s: float | None = None) -> None:
        """POST /pause_generation: what is sent after its answer finds the engine standing still."""
        await self._post("/pause_generation", {"mode": mode}, timeout_s)

    async def resume(self, timeout_s: float | None = None) -> None:
        """POST /continue_generation."""
        await self._post("/continue_generation", {}, timeout_s)

    async def update_weights(self, folder: Path, version: Version, flush_cache: bool, timeout_s: float | None = None) -> None:
        """POST /update_weights_from_disk."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": flush_cache}
        await self._post("/update_weights_from_disk", body, timeout_s)

    async def swap_weights(self, folder: Path, version: Version, mode: str, timeout_s: float | None = None) -> None:
        """POST /swap_weights, of the embedded engine alone: loads them while it generates, and exchanges them between two steps."""
        await self._post("/swap_weights", {"model_path": str(folder), "weight_version": str(version), "mode": mode}, timeout_s)

    async def join_group(self, place: GroupPlace, timeout_s: float) -> None:
        """POST /init_weights_update_group: returns when all ranks of the group are there; until then the server may do nothing else."""
        await self._post("/init_weights_update_group", {
            "group_name": place.group, "master_address": place.address, "master_port": place.port, "backend": place.backend,
            "rank_offset": place.first_rank, "world_size": place.num_ranks}, timeout_s)

    async def leave_group(self, group: str, timeout_s: float) -> None:
        """POST /destroy_weights_update_group."""
        await self._post("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    async def begin_update(self, timeout_s: float) -> None:
        """POST /begin_weight_update: `receive` may follow, and must be followed by `end_update`."""
        await self._post("/begin_weight_update", {}, timeout_s)

    async def receive(self, bucket: Bucket, version: Version | None, flush_cache: bool, timeout_s: float) -> None:
        """POST /update_weights_from_distributed: take the next broadcast of its group, which is `bucket`; `version`: with the last one."""
        body: dict = {"names": bucket.names, "dtypes": [bucket.dtype] * len(bucket.names), "shapes": bucket.shapes, "group_name": bucket.group,
                      "load_format": "flattened_bucket", "flush_cache": flush_cache}
        body |= {"starts": bucket.starts} if bucket.starts is not None else {}
        await self._post("/update_weights_from_distributed", body if version is None else {**body, "weight_version": str(version)}, timeout_s)

    async def end_update(self, timeout_s: float) -> None:
        """POST /end_weight_update."""
        await self._post("/end_weight_update", {}, timeout_s)

    async def answers(self, path: str, timeout_s: float) -> bool:
        """Whether GET `path` is answered, and not by an error."""
        try:
            await self._call("GET", path, None, timeout_s)
        except EngineError:
            return False
        return True

    async def kv_tokens(self, timeout_s: float) -> int:
        """GET /server_info: how many tokens its KV caches hold, those of all data-parallel copies together; 0 where it does not tell."""
        info = await self._call("GET", "/server_info", None, timeout_s)
        each = info.get("max_total_num_tokens") if isinstance(info, dict) else None
        if not isinstance(each, int):
            return 0
        copies = [found for name in ("dp_size", "attn_dp_size") if isinstance(found := info.get(name), int)]  # the name is that of its version
        return each * max(copies, default=1)

    async def _post(self, path: str, body: dict, timeout_s: float | None = None) -> dict:
        return await self._call("POST", path, body, timeout_s)

    async def _call(self, method: str, path: str, body: dict | None, timeout_s: float | None = None) -> dict:
        if self._session.closed:
            raise NoAnswer(f"engine: {path} failed: the server has ended")
        limit = aiohttp.ClientTimeout(total=timeout_s or self._request_timeout_s)
        try:
            async with self._session.request(method, self._url + path, json=body, timeout=limit) as response:
                if response.status >= 400:
                    kind = BadRequest if response.status < 500 else EngineError
                    raise kind(f"engine: {path} answered {response.status}: {(await response.text())[:2000]}")
                return await response.json() if response.content_type == "application/json" else {}
        except (TimeoutError, aiohttp.ClientError) as error:
            raise NoAnswer(f"engine: {path} failed: {str(error) or type(error).__name__}") from error

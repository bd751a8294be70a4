"""The embedded engine's HTTP server: SGLang's JSON on 127.0.0.1, behind an API key.

    client --POST /generate--> handler --> [gate] --submit--> engine thread ... steps ... --on_finish--+
                                  |                                                                    |
                                  +-- awaits its Future <-------- loop.call_soon_threadsafe -----------+
                                  |
                                  +-- client gone: aiohttp cancels the handler -> cancel(request): its row is freed

    client --POST /pause_generation, ... (weights: weight_updates.py)--> handler --call--> engine thread, between two steps
                                                                     +-- awaits that Future

Handlers wait for the engine only; the engine never waits for a handler. If the engine thread dies, the process prints
the traceback and exits with status 1: a client sees a closed connection, never a hang.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from workers.model.architecture import Architecture
from workers.rollout.engines.servers.embedded.api import Abort, Continue, Generate, Limits, Pause, RequestError, decode_body, require
from workers.rollout.engines.servers.embedded.engine_loop import Compute, Engine, counters
from workers.rollout.engines.servers.embedded.gate import Gate
from workers.rollout.engines.servers.embedded.requests import Request, Span
from workers.rollout.engines.servers.embedded.scheduler import Scheduler
from workers.rollout.engines.servers.embedded.weight_updates import WeightUpdates
from workers.rollout.http_serving import MAX_BODY_BYTES, body_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN_TO_ALL = "/health"


def reply(value: dict[str, Any], status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


class Server:
    """Routes of one engine. Make it inside the running event loop."""

    def __init__(self, compute: Compute, scheduler: Scheduler, limits: Limits, architecture: Architecture, model_path: Path, api_key: str) -> None:
        self._engine = Engine(compute, scheduler, limits.text, self._on_finish)
        self._limits = limits
        self._gate = Gate()
        self._updates = WeightUpdates(self._engine, self._gate, architecture, model_path, scheduler.version)
        self._tokenizer_path = str(model_path)
        self._api_key = api_key.encode()
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._rids: set[str] = set()

    def start(self) -> None:
        """Start the engine's thread."""
        threading.Thread(target=self._run_engine, name="engine", daemon=True).start()

    def application(self) -> web.Application:
        """The aiohttp application. Run it with handler_cancellation=True, or clients that leave keep their rows."""
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard], client_max_size=MAX_BODY_BYTES)
        app.add_routes([
            web.post("/generate", self.generate),
            web.post("/pause_generation", self.pause),
            web.post("/continue_generation", self.resume),
            web.post("/abort_request", self.abort),
            *self._updates.routes(),
            web.get("/health", self.health),
            web.get("/model_info", self.model_info),
            web.get("/get_model_info", self.model_info),
            web.get("/server_info", self.server_info),
            web.get("/get_server_info", self.server_info),
            web.get("/flush_cache", self.flush),
            web.post("/flush_cache", self.flush),
        ])
        return app

    async def generate(self, http: web.Request) -> web.Response:
        """POST /generate: waits until the request has ended."""
        body = decode_body(await http.read(), Generate)
        request = self._limits.request(body, await self._prompt(body))
        require(request.rid not in self._rids, "rid", request.rid, "is in use by a running request", "Send a new id, or none")
        self._rids.add(request.rid)
        try:
            async with self._gate.inside():
                await self._run(request)
        finally:
            self._rids.discard(request.rid)
        return reply(self._result(request, body))

    async def _prompt(self, body: Generate) -> list[int]:
        """A text becomes tokens beside the event loop: that may take seconds."""
        return self._limits.prompt(body) if body.text is None else await asyncio.to_thread(self._limits.prompt, body)

    async def _run(self, request: Request) -> None:
        future = self._waiting[request] = self._loop.create_future()
        self._engine.submit(request)
        try:
            await future
        except asyncio.CancelledError:
            self._engine.cancel(request)
            raise
        finally:
            self._waiting.pop(request, None)

    async def pause(self, http: web.Request) -> web.Response:
        """POST /pause_generation: answers when the engine stands still."""
        mode = decode_body(await http.read(), Pause).mode

        def pause(scheduler: Scheduler) -> int:
            # SGLang waits for these requests to end, which they cannot, and lets nobody continue.
            require(mode != "abort" or not (scheduler.paused and scheduler.running), "mode", mode,
                    f"{len(scheduler.running)} requests are paused in place", "Continue, then pause again")
            return scheduler.pause(mode)

        self._gate.paused = True
        running = await asyncio.wrap_future(self._engine.call(pause))
        return reply({"status": "ok", "message": f"Generation is paused with mode={mode}; {running} requests were running."})

    async def resume(self, http: web.Request) -> web.Response:
        """POST /continue_generation."""
        decode_body(await http.read(), Continue)
        await self._gate.open()
        await asyncio.wrap_future(self._engine.call(lambda scheduler: scheduler.resume()))
        return reply({"status": "ok", "message": "Generation continues."})

    async def abort(self, http: web.Request) -> web.Response:
        """POST /abort_request: ends a request and those whose id begins with its id, or all. An unknown id does nothing."""
        body = decode_body(await http.read(), Abort)
        if body.abort_all or body.rid in self._rids:
            prefix, message = "" if body.abort_all else body.rid, body.abort_message or "aborted by /abort_request"
            await asyncio.wrap_future(self._engine.call(lambda scheduler: scheduler.abort(prefix, message)))
        return web.Response()

    async def flush(self, http: web.Request) -> web.Response:
        """GET or POST /flush_cache: no prefix computed so far is reused. 400 while requests run."""
        if await asyncio.wrap_future(self._engine.call(lambda scheduler: scheduler.flush())):
            return web.Response(text="Cache flushed.\n")
        return web.Response(text="Flush cache failed.\n", status=400)

    async def health(self, http: web.Request) -> web.Response:
        """GET /health: answers if the engine's thread does."""
        await asyncio.wrap_future(self._engine.call(lambda scheduler: None))
        return web.Response()

    async def model_info(self, http: web.Request) -> web.Response:
        """GET /model_info: of the last update that succeeded. It answers if the engine's thread does."""
        await asyncio.wrap_future(self._engine.call(lambda scheduler: None))
        return reply({"model_path": str(self._updates.model_path), "tokenizer_path": self._tokenizer_path, "is_generation": True,
                      "weight_version": self._updates.version})

    async def server_info(self, http: web.Request) -> web.Response:
        """GET /server_info: counters since the start; requests before the gate count as queued; whether new weights are on their way in."""
        found = await asyncio.wrap_future(self._engine.call(counters))
        return reply(found | {"num_queued": found["num_queued"] + self._gate.num_waiting, "updating": self._gate.turn.locked()})

    async def _guard(self, http: web.Request, handler: Handler) -> web.StreamResponse:
        """401 without the API key, save for /health; 400 for requests that cannot be served, 408 and 413 for bodies that do not come, or do not
        end; errors are JSON as well."""
        given = http.headers.get("Authorization", "").encode(errors="surrogateescape")
        known = hmac.compare_digest(given, b"Bearer " + self._api_key)
        if not known and http.path != OPEN_TO_ALL:
            return reply({"error": {"message": "wrong or no API key. Send the header Authorization: Bearer KEY"}}, status=401)
        try:
            if known:
                await body_of(http)  # handlers read it again, from memory
            return await handler(http)
        except RequestError as error:
            return reply({"error": {"message": str(error)}}, status=400)
        except web.HTTPException as error:
            return reply({"error": {"message": f"{http.method} {http.path[:200]}: {error.reason}"}}, status=error.status)

    def _result(self, request: Request, body: Generate) -> dict[str, Any]:
        """SGLang's reply for a request that has ended."""
        finish = request.finish
        assert finish is not None
        key = {"stop": "matched", "length": "length", "abort": "message"}[finish.kind]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": {"type": finish.kind, key: finish.detail},
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached_tokens or 0,
            "weight_version": request.spans[-1].version if request.spans else self._updates.version,
            "weight_versions": request.spans or [Span(self._updates.version, 0, 0)],
            "num_retractions": request.num_retractions,
        }
        if body.return_logprob:
            pairs = zip(request.logprobs, request.output, strict=True)
            meta["output_token_logprobs"] = [(logprob, token, None) for logprob, token in pairs]
        if body.return_routed_experts and request.routing and len(request.routing) == request.num_fed:  # less where it was aborted in between
            meta["routed_experts"] = base64.b64encode(b"".join(request.routing)).decode()
        return {"text": self._text_of(request, body.sampling_params.skip_special_tokens), "output_ids": request.output, "meta_info": meta}

    def _text_of(self, request: Request, skip_special_tokens: bool) -> str:
        """The output's text without what stopped it; empty without a tokenizer."""
        finish, text = request.finish, self._limits.text
        if text is None or finish is None:
            return ""
        if finish.kind == "stop" and isinstance(finish.detail, int):
            return text.decode(request.output[:-1], skip_special_tokens)
        decoded = text.decode(request.output, skip_special_tokens)
        return decoded.split(str(finish.detail), 1)[0] if finish.kind == "stop" else decoded

    def _on_finish(self, request: Request) -> None:
        self._loop.call_soon_threadsafe(self._wake, request)

    def _wake(self, request: Request) -> None:
        future = self._waiting.get(request)
        if future is not None and not future.done():
            future.set_result(None)

    def _run_engine(self) -> None:
        try:
            self._engine.run()
        finally:  # run() never returns, so an exception is on its way
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

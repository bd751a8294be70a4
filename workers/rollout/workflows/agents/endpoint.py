"""The OpenAI-compatible endpoint of a rollout worker: HTTP on the loopback interface, a key of its own for each episode, and nothing else.

    agent --POST /v1/chat/completions, Bearer KEY--> chat of the episode with that key --> engines
          --POST /v1/completions------------------>
          --GET /v1/models-------------------------> one model, "policy"; requests may name any
          --POST /v1/reward {"reward": 0.5}--------> that chat is closed

It is opened by the first episode of a worker that needs it, shared by all that run beside it, and closed with the last.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from aiohttp import web
from aiohttp.typedefs import Handler

from workers.rollout.http_serving import MAX_BODY_BYTES, body_of, serving
from workers.rollout.workflows.agents.chat_requests import ApiError, read_chat, read_reward
from workers.rollout.workflows.agents.completions import read_completion
from workers.rollout.workflows.agents.conversation import Chat

MODEL = "policy"
LOOPBACK = ("127.0.0.1", "localhost")
MAX_ENDED = 1000
"""So many episodes that have ended are remembered, to say so."""
BACKLOG = 1024
SHUTDOWN_S = 1.0


class Endpoint:
    """Serves until it is closed; the socket is bound, and takes connections, at once. `slots`: how many agents may run at once.
    `num_users`: episodes that need it."""

    def __init__(self, num_agents: int) -> None:
        self.slots = asyncio.Semaphore(num_agents)
        self.num_users = 0
        self._chats: dict[str, Chat] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._told: set[str] = set()
        _pass_by_proxies()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        self._serving = asyncio.create_task(self._serve())

    def admit(self, chat: Chat) -> str:
        """Open the endpoint to the agent of `chat`; returns its key."""
        key = f"headway-{secrets.token_urlsafe(32)}"
        self._chats[key] = chat
        return key

    def dismiss(self, key: str) -> None:
        """The episode of `key` has ended."""
        del self._chats[key]
        self._ended[key] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    async def close(self) -> None:
        """Close the socket and all connections. Raises what serving failed with."""
        self._serving.cancel()
        (error,) = await asyncio.gather(self._serving, return_exceptions=True)
        self._socket.close()
        if isinstance(error, Exception):
            raise error

    async def _serve(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_openai_errors])
        app.add_routes([web.post("/v1/chat/completions", self._complete), web.post("/v1/completions", self._complete),
                        web.post("/v1/reward", self._reward), web.get("/v1/models", self._models), web.get("/v1/models/{name:.+}", self._models)])
        async with serving(app, self._socket, shutdown_timeout=SHUTDOWN_S, backlog=BACKLOG):
            await asyncio.Event().wait()

    def _chat(self, http: web.Request) -> Chat:
        scheme, _, key = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key in self._ended:
            raise ApiError(410, "this episode has ended", "episode_closed")
        if scheme.lower() != "bearer" or key not in self._chats:
            raise ApiError(401, "the API key is not that of an episode: give the one that the agent was started with", "invalid_api_key")
        return self._chats[key]

    async def _complete(self, http: web.Request) -> web.StreamResponse:
        chat, body = self._chat(http), await body_of(http)
        request = read_chat(body) if http.path.endswith("/chat/completions") else read_completion(body)
        self._tell(request.ignored)
        answer = await chat.ask(body, request, lambda: http.transport is None or http.transport.is_closing())
        if not request.streams:
            return web.json_response(answer.whole())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        for event in answer.stream():
            await response.write(event)
        await response.write_eof()
        return response

    async def _reward(self, http: web.Request) -> web.Response:
        chat, reward = self._chat(http), read_reward(await body_of(http))
        chat.reward(reward)
        return web.json_response({"reward": reward})

    async def _models(self, http: web.Request) -> web.Response:
        self._chat(http)
        name = http.match_info.get("name")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "headway"}
        return web.json_response(model if name else {"object": "list", "data": [model]})

    def _tell(self, ignored: tuple[str, ...]) -> None:
        for name in ignored:
            if name not in self._told:
                print(f"warning: an agent sets {name}: it is ignored, because training reckons with the run's sampling (workflow.temperature, "
                      "top_p, top_k). This is said once", flush=True)
        self._told.update(ignored)


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        wrong = ApiError(error.status, f"{request.method} {request.path[:200]}: {error.reason}. There are POST /v1/chat/completions, "
                         "POST /v1/completions, POST /v1/reward and GET /v1/models", "not_found" if error.status == 404 else "invalid_request")
        return web.json_response(wrong.body, status=error.status)


def _pass_by_proxies() -> None:
    """Have clients of this process, and of those that it starts, reach the loopback interface without a proxy, which many clusters have."""
    for name in ("NO_PROXY", "no_proxy"):
        given = list(filter(None, os.environ.get(name, "").split(",")))
        os.environ[name] = ",".join(dict.fromkeys([*given, *LOOPBACK]))


_endpoints: WeakKeyDictionary[asyncio.AbstractEventLoop, Endpoint] = WeakKeyDictionary()


@asynccontextmanager
async def shared_endpoint(num_agents: int) -> AsyncIterator[Endpoint]:
    """The endpoint of this event loop's episodes, open as long as one of them needs it."""
    loop = asyncio.get_running_loop()
    endpoint = _endpoints.get(loop) or _endpoints.setdefault(loop, Endpoint(num_agents))
    endpoint.num_users += 1
    try:
        yield endpoint
    finally:
        endpoint.num_users -= 1
        if not endpoint.num_users:
            del _endpoints[loop]
            await endpoint.close()


@asynccontextmanager
async def admitted(endpoint: Endpoint, chat: Chat) -> AsyncIterator[str]:
    """The key by which an agent reaches `chat`; none any more at the end."""
    key = endpoint.admit(chat)
    try:
        yield key
    finally:
        chat.close()
        endpoint.dismiss(key)

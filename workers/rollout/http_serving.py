"""What the HTTP servers of a worker take in: so many connections, so many bytes, in so much time.

    connection --over the limit--> closed          --no whole request within `IDLE_S`--> closed (aiohttp's keep-alive)
    headers    --over 8 KiB a line, 128 lines--> 400 (aiohttp's parser)
    body       --over `MAX_BODY_BYTES`--> 413      --not there within `BODY_S`--> 408

So whoever sends half a request, or none, holds a descriptor for seconds and no more. An idle connection outlasts those that clients keep (15 s).
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

IDLE_S = 30.0
BODY_S = 30.0
MAX_BODY_BYTES = 16 << 20
MAX_CONNECTIONS = 10_000
RESERVED_DESCRIPTORS = 200
"""For everything else that a process opens; the rest may be connections."""


class _TooMany(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def max_connections() -> int:
    """How many connections one server of this process may hold."""
    return max(1, min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_DESCRIPTORS))


@asynccontextmanager
async def serving(app: web.Application, listener: socket.socket, *, idle_s: float = IDLE_S, **options: Any) -> AsyncIterator[None]:
    """Serve `app` at `listener` within the block; `options`: of aiohttp's runner, `backlog`."""
    backlog, limit = options.pop("backlog", 128), max_connections()
    runner = web.AppRunner(app, access_log=None, keepalive_timeout=idle_s, **options)
    try:
        await runner.setup()
        http = runner.server
        assert http is not None

        def connected() -> asyncio.BaseProtocol:
            return http() if len(http.connections) < limit else _TooMany()

        server = await asyncio.get_running_loop().create_server(connected, sock=listener, backlog=backlog)
        try:
            yield
        finally:
            server.close()
    finally:
        await runner.cleanup()


async def body_of(http: web.Request, limit_s: float = BODY_S) -> bytes:
    """The body. Raises `web.HTTPException`: 413 where it is too long, 408 where it does not come, 400 where it cannot be read."""
    try:
        async with asyncio.timeout(limit_s):
            return await http.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason=f"the body has not come within {limit_s:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise web.HTTPRequestEntityTooLarge(http.client_max_size, 0, reason=f"a body may have at most {http.client_max_size} bytes") from error
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(reason=f"the body cannot be read ({type(error).__name__})") from error

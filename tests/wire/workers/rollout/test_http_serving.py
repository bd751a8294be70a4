"""What an HTTP server of a worker takes in: real sockets that say nothing, half of something, or too much."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from workers.model.initialize import make_tiny
from workers.rollout import http_serving
from workers.rollout.engines.servers.embedded.text import Text
from workers.rollout.http_serving import body_of, serving

DEADLINE_S = 60.0
SHORT_S = 0.2


@asynccontextmanager
async def served(**options: float) -> AsyncIterator[tuple[str, int]]:
    async def echo(http: web.Request) -> web.Response:
        return web.Response(body=await body_of(http, SHORT_S))

    app = web.Application(client_max_size=1000)
    app.add_routes([web.post("/", echo)])
    listener = socket.create_server(("127.0.0.1", 0))
    async with serving(app, listener, lingering_time=SHORT_S, **options), asyncio.timeout(DEADLINE_S):
        yield listener.getsockname()


async def said(address: tuple[str, int], request: bytes) -> bytes:
    """All that the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request)
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


POST = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


@pytest.mark.parametrize("half", [b"", b"POST", b"POST / HTTP/1.1\r\nHost: x\r\nConten"])
async def test_half_a_request_is_not_kept(half: bytes) -> None:
    async with served(idle_s=SHORT_S) as address:
        assert await said(address, half) == b""


@pytest.mark.parametrize(("request_", "status"), [
    (POST + b"Content-Length: 10\r\n\r\nhalf", b"408"), (POST + b"Content-Length: 2000\r\n\r\n" + b"x" * 2000, b"413"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhal", b"408"), (POST + b"Content-Length: -1\r\n\r\n", b"400"),
    (POST + b"X: " + b"x" * 10_000 + b"\r\n\r\n", b"400"), (b"\xff\xfe\r\n\r\n", b"400"), (POST + b"Content-Length: 4\r\n\r\ngood", b"200")])
async def test_bodies_that_do_not_come_or_do_not_end_are_answered(request_: bytes, status: bytes) -> None:
    async with served() as address:
        assert b" " + status + b" " in (await said(address, request_)).split(b"\r\n")[0]


async def test_connections_are_bounded_and_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_serving, "max_connections", lambda: 2)
    async with served(idle_s=2.0) as address:
        silent = [await asyncio.open_connection(*address) for _ in range(2)]
        assert await said(address, POST + b"Content-Length: 4\r\n\r\ngood") == b"", "one too many"
        assert [await reader.read() for reader, _ in silent] == [b"", b""]
        for _, writer in silent:
            writer.close()
        assert (await said(address, POST + b"Content-Length: 4\r\n\r\ngood")).endswith(b"good")


def test_of_a_text_that_is_far_too_long_only_the_beginning_becomes_tokens(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", 1)
    text = Text(tmp_path / "model")
    assert text.encode("12 + 30", 64) == text.encode("12 + 30", 1)
    assert 64 < len(text.encode("12 + 30 = " * 2_000_000, 64)) <= 100_000

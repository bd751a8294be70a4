"""A chat endpoint that misbehaves as it is told, with real sockets, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

Behave = Callable[[int, str], str]
"""What becomes of a request, by its number from 0 on and the question: a key of `ANSWERS`, an HTTP status, or the text of an answer."""


def completion(text: Any) -> bytes:
    return json.dumps({"id": "1", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], "usage": {"n": 1}}).encode()


ANSWERS: dict[str, bytes] = {
    "half": b'{"choices": [{"message": {"con', "no json": b"<html>busy</html>", "no text": b"\xff\xfe\x00", "nothing": b"", "null": completion(None),
    "list": completion(["Score: 5"]), "number": completion(5), "empty": completion(""), "no choices": b'{"choices": []}', "array": b"[]",
    "other": b'{"error": "overloaded"}', "deep": b"[" * 100_000, "deep inside": b'{"choices": ' + b'{"a": ' * 100_000,
    "outside": completion("Score: 11"), "below": completion("Score: -1"), "words": completion("Score: many"),
    "infinite": completion("Score: 1" + "0" * 3000),
}
"""Bodies with status 200 that have no score."""
OK = b"HTTP/1.1 200 OK\r\n"
RAW = {
    "closed": b"", "garbage": b"\x00\x01 not HTTP at all\r\n\r\n", "cut": OK + b"Content-Length: 1000\r\n\r\n{",
    "bad length": OK + b"Content-Length: -1\r\n\r\n",
    "bad status": b"HTTP/1.1 \xff\xfe bad\r\n\r\n", "bad header": OK + b"Bad\xff\xed\xa0\x80 Header: \xff\r\nContent-Length: 0\r\n\r\n",
    "bad chunk": OK + b"Transfer-Encoding: chunked\r\n\r\n\xff\xffZZZ\r\n", "long header": OK + b"A: " + b"x" * 100_000 + b"\r\n\r\n",
    "many headers": OK + b"".join(b"A%d: x\r\n" % number for number in range(10_000)) + b"\r\n",
}
"""Answers that are none of HTTP."""


class JudgeServer:
    """`questions`: of all requests so far; `keys`: their Authorization; `most`: how many there were at once."""

    def __init__(self, behave: Behave) -> None:
        self._behave = behave
        self.questions: list[str] = []
        self.keys: list[str] = []
        self.in_flight = self.most = 0
        self.arrived = threading.Semaphore(0)
        self.go_on = threading.Event()
        self._over = asyncio.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        number, question = len(self.questions), body["messages"][0]["content"]
        self.questions.append(question)
        self.keys.append(request.headers.get("Authorization", ""))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        self.arrived.release()
        try:
            return await self._answer(request, self._behave(number, question))
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, said: str) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        if said in ("hang", "wait"):
            await (self._over.wait() if said == "hang" else asyncio.to_thread(self.go_on.wait))
            return web.Response(body=completion("Score: 5"))
        if said in RAW:
            transport.write(RAW[said])
            transport.close()
            return web.Response()
        if said in ("huge", "drip"):
            response = web.StreamResponse()
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):  # whoever listens has had enough
                while not self._over.is_set():
                    await response.write(b" " * (1 << 16 if said == "huge" else 1))
                    await asyncio.sleep(0)
            return response
        if said == "packed":  # 8 MiB of blanks in 8 KiB
            packer = zlib.compressobj(wbits=31)
            return web.Response(body=packer.compress(b" " * (8 << 20)) + packer.flush(), headers={"Content-Encoding": "gzip"})
        if said == "elsewhere":
            return web.Response(status=307, headers={"Location": self.url + "/other"})
        if said.isdecimal():
            return web.Response(status=int(said), text=f"no: {self.keys[-1]}\x1b[31m")
        return web.Response(body=ANSWERS[said] if said in ANSWERS else completion(said))

    def serve(self, started: threading.Event) -> None:
        asyncio.run(self._serve(started))

    async def _serve(self, started: threading.Event) -> None:
        self.loop = asyncio.get_running_loop()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/v1/other", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, self.socket).start()
        started.set()
        await self._over.wait()
        await runner.cleanup()

    def end(self) -> None:
        self.go_on.set()
        self.loop.call_soon_threadsafe(self._over.set)


@contextmanager
def judge_server(behave: Behave = lambda number, question: "It is fine. Score: 5") -> Iterator[JudgeServer]:
    server, started = JudgeServer(behave), threading.Event()
    thread = threading.Thread(target=server.serve, args=(started,))
    thread.start()
    try:
        assert started.wait(30)
        yield server
    finally:
        server.end()
        thread.join(30)
        assert not thread.is_alive()

"""Waiting for what the coordinator says, while it is asked again and again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from workers.messages.parts import Message


class News:
    """`tell` wakes whoever waits. `beat_s`: how often somebody is asked again; `send`: asks."""

    def __init__(self, beat_s: float, send: Callable[[Message], Awaitable[None]]) -> None:
        self.beat_s, self._send = beat_s, send
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something has been heard."""
        self._news.set()
        self._news = asyncio.Event()

    async def or_end_of(self, job: asyncio.Task) -> None:
        """Wait until something is heard, or `job` has ended."""
        news = asyncio.create_task(self._news.wait())
        await asyncio.wait([job, news], return_when=asyncio.FIRST_COMPLETED)
        news.cancel()

    async def until(self, heard: Callable[[], object], limit_s: float, request: Message | None = None) -> bool:
        """Wait until `heard`, saying `request` once a heartbeat; false after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while True:
            news = self._news  # taken before looking, so that nothing is missed while the request is sent
            if heard():
                return True
            if request is not None:
                await self._send(request)
            now = time.monotonic()
            if now >= deadline:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self.beat_s, deadline - now)):
                    await news.wait()

"""How one server is interrupted, and what that takes.

    pause by engine.interrupt --> what is to be done --> continue
              |
              +-- the server does not know that mode: abort, from now on; what it ran is sent again with the tokens so far

    weights.swap=overlap: one call, in which the server loads while it generates, and does to what runs what engine.interrupt says
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from workers.config import EngineConfig, Interrupt, Swap
from workers.messages.parts import Version
from workers.rollout.engines.client import BadRequest, EngineClient

BEGIN_AGAIN_S = 1.0
"""So long after a pause what it interrupted may take to run again."""


class Interruption:
    """The pauses of one server over all its lives. `name`: the server's, for people. `pause_s`, `load_s`, `update_s`: seconds until it stood still,
    of loading, and of whole pauses: none with weights.swap=overlap. `num_changes` counts beginnings and ends of pauses: it is odd while one is
    on."""

    def __init__(self, name: str, config: EngineConfig, swap: Swap) -> None:
        self.num_changes = 0
        self.pause_s = self.load_s = self.update_s = 0.0
        self.mode, self.swap = config.interrupt, swap
        self._name, self._limit_s = name, config.load_timeout_s
        self._resumed_at = float("-inf")

    @contextmanager
    def lasting(self, at_work: bool) -> Iterator[None]:
        """A pause, from before it is asked for to after it has ended; `at_work`: it interrupts requests."""
        started = time.monotonic()
        self.num_changes += 1
        begun = self.num_changes
        try:
            yield
        finally:
            now = time.monotonic()
            self.num_changes += self.num_changes == begun  # unless the server has ended meanwhile (forget)
            self.update_s += now - started
            if at_work:
                self._resumed_at = now

    def forget(self) -> None:
        """The server has ended, and no pause is on."""
        self.num_changes += self.num_changes % 2

    async def begin(self, client: EngineClient) -> None:
        """Have the server stand still."""
        started = time.monotonic()
        try:
            await client.pause(self.mode.value, self._limit_s)
        except BadRequest as error:
            if self.mode is Interrupt.abort:
                raise
            print(f"warning: {self._name} does not know engine.interrupt={self.mode.value}: from now on it is interrupted by abort ({error})",
                  flush=True)
            self.mode = Interrupt.abort
            await client.pause(self.mode.value, self._limit_s)
        self.pause_s += time.monotonic() - started

    @contextmanager
    def loading(self) -> Iterator[None]:
        """The time of loading."""
        started = time.monotonic()
        yield
        self.load_s += time.monotonic() - started

    async def load(self, client: EngineClient, folder: Path, version: Version, at_work: bool) -> None:
        """Have the server go on with the weights in `folder`, by weights.swap. Raises `EngineError`, and leaves a server that was paused as it is."""
        if self.swap is Swap.overlap:
            with self.loading():
                await client.swap_weights(folder, version, self.mode.value, self._limit_s)
            self._resumed_at = time.monotonic() if at_work else self._resumed_at
            return
        with self.lasting(at_work):
            await self.begin(client)
            with self.loading():
                await client.update_weights(folder, version, flush_cache=self.mode is not Interrupt.in_place, timeout_s=self._limit_s)
            await self.end(client)

    async def end(self, client: EngineClient) -> None:
        """Have the server go on."""
        await client.resume(self._limit_s)

    async def settled(self) -> None:
        """Wait until what the last pause interrupted runs again."""
        await asyncio.sleep(self._resumed_at + BEGIN_AGAIN_S - time.monotonic())

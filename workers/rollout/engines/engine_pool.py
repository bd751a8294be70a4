"""The inference servers of one worker: which of them takes what, and what they hold together.

    lease --seat--> group_routing.py: a server that holds its version and has room --> the requests of the whole group
                    none: wait until one starts, has newer weights, or has room again

Newer weights go to one server after the other: the others generate meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from workers.config import Config
from workers.messages.parts import Lease, Version
from workers.rollout.engines.engine import Engine, Weights
from workers.rollout.engines.group_routing import Lengths, Routing, key_of
from workers.rollout.engines.servers.process import ServerProcess


class Engines:
    """The servers, kept running by `live`. `spawn` makes the process of one, by its number; `newest`: the weights to hold; `changed` is awaited
    whenever what they hold, or whether they take work, has changed. `serve_start`: they take work with the weights that they start with."""

    def __init__(self, config: Config, spawn: Callable[[int], ServerProcess], newest: Callable[[], Weights | None],
                 changed: Callable[[], Awaitable[None]], serve_start: bool = False) -> None:
        number, samples = config.num_servers, config.evaluation.num_samples
        size = samples if config.evaluates else max(config.workflow.group_size, samples)
        # Half as much again as there are slots: a server always has a request at hand when one ends.
        self._routing = Routing(number, max(size, config.engine.num_slots * 3 // 2 // size * size))
        self._lengths = Lengths(config.workflow.max_new_tokens)
        self._tell, self._waiting, self._closed = changed, 0.0, False
        self._news = asyncio.Event()
        self.engines = [Engine(f"engine {index + 1} of {number}" if number > 1 else "the engine", partial(spawn, index), config.engine, newest,
                               self._changed, serve_start, config.weights.swap) for index in range(number)]

    async def live(self) -> None:
        """Keep all of them running. Raises what ends one for good, in a group."""
        async with asyncio.TaskGroup() as tasks:
            for engine in self.engines:
                tasks.create_task(engine.live())

    async def catch_up(self) -> None:
        """Bring all that run to the newest weights, one after the other. Raises as `Engine.catch_up`."""
        for engine in self.engines:
            await engine.catch_up()

    # -- what they are -------------------------------------------------------------------------------------------------

    @property
    def held(self) -> Version | None:
        """The oldest version that one of them generates with; None: none of them takes work."""
        return min((engine.held for engine in self.engines if engine.held is not None), default=None)

    @property
    def capacity(self) -> int:
        """How many samples those take at once that hold weights; before any does, those that run."""
        return self._routing.capacity * len(self._able())

    @property
    def kv_tokens(self) -> int:
        """How many tokens the KV caches of the same servers hold; 0 where one of them does not tell."""
        each = [engine.kv_tokens for engine in self._able()]
        return sum(each) if all(each) else 0

    def _able(self) -> list[Engine]:
        running = [engine for engine in self.engines if engine.client is not None]
        return [engine for engine in running if engine.held is not None] or running

    @property
    def tokens_in_flight(self) -> int:
        """Tokens of all samples that are being generated or wait for a server: prompts, what they have, and what is expected."""
        return self._routing.tokens + max(0, round(self._waiting))

    @property
    def waiting_for(self) -> str:
        """What servers wait for that do not run, in words; '' if all do."""
        return "; ".join(f"{engine.name} {engine.waiting_for}" for engine in self.engines if engine.waiting_for)

    def mean(self, name: str) -> float:
        """The mean of what they have measured: `pause_s`, `load_s`, `update_s`."""
        return sum(getattr(engine.interruption, name) for engine in self.engines) / len(self.engines)

    # -- work ----------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def seat(self, lease: Lease, prompt: int, so_far: int) -> AsyncIterator[Engine | None]:
        """A server for one request of `lease`, as long as the block lasts; waits until there is one. None once they are closed.

        `prompt`, `so_far`: numbers of tokens.
        """
        key, tokens = key_of(lease), self._lengths.expected(so_far)
        self._waiting += prompt + tokens
        try:
            while (server := self._routing.place(key, lease.version, [engine.held for engine in self.engines])) is None and not self._closed:
                await self._news.wait()
        finally:
            self._waiting -= prompt + tokens
        if server is None or self._closed:
            yield None
            return
        request = self._routing.begin(key, prompt, tokens)
        try:
            yield self.engines[server]
        finally:
            self._routing.end(request)
            self._notify()

    def finished(self, length: int) -> None:
        """An answer has come to its end with so many tokens."""
        self._lengths.add(length)

    def release(self, lease: Lease) -> None:
        """No more requests of this lease come."""
        self._routing.forget(key_of(lease))

    def close(self) -> None:
        """Give no more seats."""
        self._closed = True
        self._notify()

    async def abort(self, limit_s: float) -> bool:
        """Have all running requests come back with the tokens that they have; whether all servers did so within `limit_s` seconds."""
        return all(await asyncio.gather(*(engine.abort(limit_s) for engine in self.engines)))

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _changed(self) -> None:
        self._notify()
        await self._tell()

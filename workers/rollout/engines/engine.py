"""One inference server of a worker over all its lives, and the weights that it holds.

    start --> load the newest weights --> takes work <------------------------------+
      ^                                     |  newer weights (interruption.py) ------+
      |                                     |
      +--- pause, longer each time <--- it exited | it hung | it refused its weights twice
                  |
                  +--- too many restarts, or the first start failed: the worker ends

It takes work (`held` is not None) only while it holds weights that were published, or, where nothing is trained, those that it starts with. A
server that may hold half an update never goes on: it is ended. What it had not given back is sampled again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from workers.config import EngineConfig, Interrupt, Swap
from workers.messages.parts import Version
from workers.rollout.engines.client import EngineClient, EngineError, NoAnswer
from workers.rollout.engines.interruption import Interruption
from workers.rollout.engines.restarts import Restarts
from workers.rollout.engines.servers.process import PROBES, ServerProcess
from workers.run.own_pause import own_pause
from workers.slurm.termination import WorkerEnded
from workers.weights.manifest import MANIFEST, WeightsError

BEGINNING = Version(0, 0)
EXIT_S = 5.0
"""So soon a process that is the cause of a failed call is seen to be gone."""
PROBE_S = 5.0
ANSWER_S = 30.0


@dataclass(frozen=True)
class Weights:
    """A version that is on this node, ready to be loaded."""

    version: Version
    folder: Path

    @property
    def is_gone(self) -> bool:
        """Whether whoever published it has removed it."""
        return not (self.folder / MANIFEST).exists()


class Engine:
    """A server that is kept running by `live`, and brought up to date by `catch_up`. `newest`: the weights to hold; `changed` is told whenever
    what it holds, or whether it takes work, changes. `serve_start`: it takes work with the weights that it starts with, as version `BEGINNING`.
    `num_requests`: under way, to be counted by who sends them. `kv_tokens`: how many its KV cache holds; 0: not known."""

    def __init__(self, name: str, spawn: Callable[[], ServerProcess], config: EngineConfig, newest: Callable[[], Weights | None],
                 changed: Callable[[], Awaitable[None]], serve_start: bool = False, swap: Swap = Swap.pause) -> None:
        self.name, self.waiting_for = name, "to start"
        self.held: Version | None = None
        self.client: EngineClient | None = None
        self.num_requests = self.num_restarts = self.kv_tokens = 0
        self.interruption = Interruption(name, config, swap)
        self._spawn, self._config, self._newest, self._changed, self._serve_start = spawn, config, newest, changed, serve_start
        self._restarts = Restarts(config.max_restarts, 60 * config.restart_minutes)
        self._process: ServerProcess | None = None
        self._broken: asyncio.Future[str]
        self._refused: Version | None = None
        self._stands_still = False
        self._loading = asyncio.Lock()

    # -- its lives -----------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Keep a server running for as long as the worker does. Raises `WorkerEnded` once it has been started again too often, and
        `EngineError` if it cannot even be started once, or refuses its weights from the start."""
        starting = True
        while True:
            how = await self._one_life(starting)
            starting = False
            delay = self._restarts.next(time.monotonic())
            if delay is None:
                raise WorkerEnded(f"{how}{self._used_up()}")
            self.num_restarts += 1
            cause = how.partition("; its log")[0]
            self.waiting_for = f"to start again (restart {self._restarts.num_recent} of {self._config.max_restarts}): {cause}"
            print(f"warning: {self.name} is started again in {delay:g} s: {how}", flush=True)
            await self._changed()
            await asyncio.sleep(delay)

    def _used_up(self) -> str:
        most = self._config.max_restarts
        return f"\nIt has been started again {most} times within {self._config.restart_minutes:g} minutes (engine.max_restarts)" if most else ""

    async def _one_life(self, starting: bool) -> str:
        """Start a server and stay with it; returns how it ended. Raises `EngineError` where the first one does not start."""
        self._process, self._broken = self._spawn(), asyncio.get_running_loop().create_future()
        try:
            self.client = await self._process.start(BEGINNING)
        except EngineError as error:
            if starting:
                raise
            return str(error)
        self.waiting_for, self.held = "", BEGINNING if self._serve_start else None
        ends = [asyncio.create_task(self._process.exited()), asyncio.create_task(self._hangs(self.client)), self._broken]
        try:
            self.kv_tokens = 0
            with contextlib.suppress(EngineError):  # then it is not known; whether the server is well, others look after
                self.kv_tokens = await self.client.kv_tokens(ANSWER_S)
            await self._changed()
            try:
                await self.catch_up()
            except WeightsError as error:
                print(f"warning: {self.name} takes no work until there are newer weights: {error}", flush=True)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            # If the process has gone, that is the cause of everything else that went wrong.
            return await self._process.exited_within(EXIT_S) or next(end.result() for end in ends if end.done())
        finally:
            client, self.client, self.held, self._stands_still = self.client, None, None, False
            self.interruption.forget()
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            await self._process.stop()
            await client.close()

    async def _hangs(self, client: EngineClient) -> str:
        """Return when the server has not answered a probe for engine.health_timeout_s, pauses left out; says so."""
        limit, well = self._config.health_timeout_s, time.monotonic()
        while True:
            looked, pause = time.monotonic(), min(PROBE_S, limit / 4)
            await asyncio.sleep(pause)
            pauses = self.interruption.num_changes
            answers = pauses % 2 == 1 or self._stands_still or await client.answers(PROBES[self._config.server], min(ANSWER_S, limit))
            if answers or self.interruption.num_changes != pauses:
                well = time.monotonic()
                continue
            now = time.monotonic()
            well = min(now, well + own_pause(now - looked, pause + min(ANSWER_S, limit)))
            if now - well > limit:
                return f"{self.name} has given no sign of life for {limit:g} s (engine.health_timeout_s)"

    async def is_lost(self, client: EngineClient) -> bool:
        """Whether the server behind `client`, of which a call has failed, is gone or about to be ended."""
        process = self._process
        if self.client is client and not self._broken.done() and process is not None:
            how = await process.exited_within(EXIT_S)
            if how is not None and self.client is client:
                self._break(how)
        return self.client is not client or self._broken.done()

    async def abort(self, limit_s: float) -> bool:
        """Have all running requests come back with the tokens that they have; whether it did so within `limit_s` seconds.

        An update is let come to its end, and what it interrupted begin again: of requests that wait in its queue, SGLang gives back no tokens.
        """
        with contextlib.suppress(TimeoutError, EngineError):
            async with asyncio.timeout(limit_s), self._loading:
                await self.interruption.settled()
                if self.client is not None:
                    await self.client.pause(Interrupt.abort.value, limit_s)
                return True
        return False

    def _break(self, how: str, client: EngineClient | None = None) -> None:
        """End this life: nothing more is sent to the server. `client`: only if it is still that one's."""
        if client is not None and self.client is not client:
            return
        self.held = None
        if not self._broken.done():
            self._broken.set_result(how)

    # -- its weights ---------------------------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Load the newest weights, if it runs and does not hold them. A failure ends its life. Raises `WeightsError` where they are gone, and
        `EngineError` where it refuses them in a second life too."""
        async with self._loading:
            client, weights = self.client, self._newest()
            if client is None or self._broken.done() or weights is None or (self.held is not None and weights.version <= self.held):
                return
            try:
                await self._load(client, weights)
            except NoAnswer as error:
                self._break(str(error), client)
                return
            except EngineError as error:
                again, self._refused = self._refused == weights.version, weights.version
                if again:
                    raise
                self._break(f"{self.name} has refused version {weights.version} twice: {error}", client)
                return
            self._holds(weights.version, client)
        await self._changed()

    async def receive(self, version: Version, go: Callable[[], Awaitable[bool]], load: Callable[[EngineClient], Awaitable[None]]) -> bool:
        """Pause; have `load` bring `version` by broadcast if `go` says so; continue. Whether it holds `version` then.

        A server that fails may hold half an update: it stands still, and takes no work, until it has loaded whole weights (`catch_up`).
        """
        async with self._loading:
            client, interruption = self.client, self.interruption
            if client is None or self._broken.done():
                return False
            with interruption.lasting(at_work=self.num_requests > 0):
                try:
                    await interruption.begin(client)
                    if await go():
                        with interruption.loading():
                            await load(client)
                        self._holds(version, client)
                    await interruption.end(client)
                except NoAnswer as error:
                    self._break(str(error), client)
                except EngineError as error:
                    self.held, self._stands_still = None, self.client is client
                    print(f"warning: {self.name} has not got version {version} by broadcast: {error}", flush=True)
        await self._changed()
        return self.held == version

    def _holds(self, version: Version, client: EngineClient) -> None:
        """The server behind `client` has `version`, if it has not gone meanwhile."""
        if self.client is client:
            self.held, self._refused, self._stands_still = version, None, False

    async def _load(self, client: EngineClient, weights: Weights) -> None:
        """Load by weights.swap; once more if it is refused. Raises `EngineError` after that, and leaves a server that was paused standing still."""
        for again in (False, True):
            try:
                await self.interruption.load(client, weights.folder, weights.version, at_work=self.num_requests > 0)
                return
            except NoAnswer:
                raise
            except EngineError as error:
                if weights.is_gone:  # then it was not even begun to be loaded
                    await self.interruption.end(client)
                    raise WeightsError(f"{weights.folder}: version {weights.version} was removed before it was loaded") from error
                if again:
                    raise
                print(f"warning: {self.name} has refused version {weights.version}, and is given it once more: {error}", flush=True)

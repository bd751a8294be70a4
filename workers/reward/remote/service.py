"""Answers the requests of rollout workers with a pool of processes. One task a request; the pool decides which of them runs."""

from __future__ import annotations

import asyncio
import functools

from workers.config import ConfigError
from workers.messages.codec import MessageError
from workers.messages.judging import FromElement, NoAnswer, OutputGiven, OutputWanted, ScoreGiven, ScoreWanted, Unwanted
from workers.reward.pool.pool import RewardPool, VerifierError
from workers.transport.element_sockets import ElementSocket

LINGER_MS = 2000
"""For answers that are on their way when the element leaves."""


class RewardService:
    """Serves from `serve` to `close`. `num_requests`: those that have no answer yet."""

    def __init__(self, socket: ElementSocket, pool: RewardPool) -> None:
        self._socket, self._pool = socket, pool
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def num_requests(self) -> int:
        """Requests that run, or wait for a process."""
        return len(self._tasks)

    @property
    def refused(self) -> tuple[int, int]:
        """Connections without the run's keys, and messages that cannot be read."""
        return self._socket.door.num_refused, self._socket.num_malformed

    async def serve(self) -> None:
        """Take requests for ever. Raises what an answer broke with."""
        taking = asyncio.create_task(self._take())
        try:
            await asyncio.wait([taking, self._broken], return_when=asyncio.FIRST_COMPLETED)
            (self._broken if self._broken.done() else taking).result()
        finally:
            taking.cancel()

    async def _take(self) -> None:
        while True:
            try:
                peer, request = await self._socket.receive()
            except MessageError as error:
                print(f"warning: a rollout worker sent what is no request: {error}", flush=True)
                continue
            known = self._tasks.get(key := (peer, request.number))
            if isinstance(request, Unwanted):
                if known is not None:
                    known.cancel()
            elif known is None:
                self._tasks[key] = task = asyncio.create_task(self._answer(peer, request))
                task.add_done_callback(functools.partial(self._answered, key))

    def _answered(self, key: tuple[bytes, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _answer(self, peer: bytes, request: ScoreWanted | OutputWanted) -> None:
        answer: FromElement
        try:
            if isinstance(request, ScoreWanted):
                score = await self._pool.score(request.prompt, request.completion, request.reference, request.verifier)
                answer = ScoreGiven(request.number, score)
            else:
                answer = OutputGiven(request.number, await self._pool.execute(request.code))
        except (VerifierError, ConfigError) as error:
            answer = NoAnswer(request.number, str(error))
        await self._socket.send(peer, answer)

    async def finish(self, timeout_s: float) -> None:
        """Wait until all requests have their answers, for at most `timeout_s` seconds. `serve` must still run, or nobody ask any more."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)

    async def close(self) -> None:
        """Give up what has no answer yet, and close the socket: whoever waits asks another element."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._socket.close(linger_ms=LINGER_MS)

"""The reward pool: scores completions in killable processes beside generation.

    score() --FIFO--> a free slot -> its process (child.py) -> score in [0, 1]
                        ^                 | no score: raised, hung, crashed, out of memory, not a number
                        |                 v
                        +------ kill with all it started, take a fresh one, try again; in the end VerifierError

A caller waits only for a slot, and a slot is busy for at most (1 + reward.max_retries) x (the time to load plus
reward.timeout_s), so nobody waits forever. A verifier that gives no score is a failure of the infrastructure and
never a reward: the caller gets `VerifierError`, not zero. Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from workers.config import RewardConfig
from workers.reward.child import REAP_TIMEOUT_S, NoScoreError, RewardProcess
from workers.reward.messages import Request
from workers.reward.verifiers import check_name

LOG = logging.getLogger(__name__)


class VerifierError(RuntimeError):
    """A verifier gave no score. Its text names the verifier and the cause; it is not a judgement of the completion."""


def scale(score: float, config: RewardConfig) -> float:
    """The reward for `score` in [0, 1]: linear from `config.wrong` at 0 to `config.correct` at 1."""
    return config.wrong + score * (config.correct - config.wrong)


class _Slot:
    """A place for one process; empty after a failure, until the next request fills it."""

    def __init__(self) -> None:
        self.process: RewardProcess | None = None


class RewardPool:
    """`async with RewardPool(config) as pool: score = await pool.score(...)`; raises `ConfigError` for an unknown verifier.

    Counters since the start, for metrics: `num_scored` (scores given), `num_failed` (`VerifierError`s raised),
    `num_killed` (processes that were killed, or found dead, and replaced), `busy_s` (seconds of processes at work).
    """

    def __init__(self, config: RewardConfig) -> None:
        check_name(config.verifier)
        self._config = config
        self._slots = [_Slot() for _ in range(config.num_processes)]
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._disposals: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_scored = 0
        self.num_failed = 0
        self.num_killed = 0
        self.busy_s = 0.0

    async def __aenter__(self) -> Self:
        try:
            for slot in self._slots:
                slot.process = RewardProcess(self._config)  # returns at once: they start up side by side
        except OSError:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that are up."""
        return [slot.process.pid for slot in self._slots if slot.process is not None]

    async def score(self, prompt: str, completion: str, reference: str, verifier: str) -> float:
        """The score in [0, 1] that `verifier` gives `completion`; requests are served first come, first served.

        Raises `ConfigError` if there is no such verifier, and `VerifierError` if it gave no score, `reward.max_retries`
        retries on fresh processes included, or if the pool is closed. Cancelling kills the process at work.
        """
        check_name(verifier)
        self._check_open()
        request = Request(verifier, prompt, completion, reference)
        slot = await self._free.get()
        try:
            return await self._score(slot, request)
        finally:
            self._free.put_nowait(slot)

    async def _score(self, slot: _Slot, request: Request) -> float:
        cause = ""
        for _ in range(1 + self._config.max_retries):
            self._check_open()
            try:
                score = await self._attempt(slot, request)
            except (NoScoreError, OSError) as error:  # OSError: no process could be started
                cause = str(error)
                LOG.warning("verifier %s gave no score: %s", request.verifier, cause)
            else:
                self.num_scored += 1
                return score
        self._check_open()
        self.num_failed += 1
        raise VerifierError(f"verifier {request.verifier!r} gave no score in {1 + self._config.max_retries} attempts; the last: {cause}. "
                            "Correct the verifier, or raise reward.timeout_s or reward.memory_mb")

    async def _attempt(self, slot: _Slot, request: Request) -> float:
        if slot.process is not None and not slot.process.is_usable():
            self._replace(slot)
        if slot.process is None:
            slot.process = RewardProcess(self._config)
        start = time.monotonic()
        finished = False
        try:
            score = await slot.process.score(request)
            finished = True
            return score
        finally:  # cancellation included
            self.busy_s += time.monotonic() - start
            if not finished:
                self._replace(slot)

    def _replace(self, slot: _Slot) -> None:
        self.num_killed += 1
        self._dispose(slot)

    def _dispose(self, slot: _Slot) -> None:
        """Empty `slot`; its process is killed now and reaped in the background."""
        process, slot.process = slot.process, None
        if process is not None:
            process.kill()
            task = asyncio.get_running_loop().create_task(process.dispose())
            self._disposals.add(task)
            task.add_done_callback(self._disposed)

    def _disposed(self, task: asyncio.Task[None]) -> None:
        self._disposals.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            LOG.error("a killed reward process is not gone: %s", error)

    def _check_open(self) -> None:
        if self._closed:
            raise VerifierError("the reward pool is closed")

    async def close(self) -> None:
        """Kill all processes with everything they started and reap them. Whoever waits in `score` gets `VerifierError`."""
        if self._closed:
            return
        self._closed = True
        for slot in self._slots:
            if slot.process is not None:
                slot.process.kill()  # whoever waits for it sees it end, and finds the pool closed
        try:
            async with asyncio.timeout(2 * REAP_TIMEOUT_S):
                for _ in self._slots:  # behind all waiting callers, for the queue is first come, first served
                    await self._free.get()
                for slot in self._slots:
                    self._dispose(slot)
                await asyncio.gather(*self._disposals, return_exceptions=True)
        except TimeoutError:
            LOG.error("the reward pool did not close within %g s; processes %s", 2 * REAP_TIMEOUT_S, self.pids)

"""The reward pool: scores completions, and runs models' programs, in killable processes beside generation.

    score(), execute() --FIFO--> a free slot -> its process (process_handle.py) -> score in [0, 1], output
                                   ^                 | no answer: raised, hung, crashed, out of memory, not a number
                                   |                 v
                                   +------ kill with all it started, take a fresh one, try again; in the end VerifierError

A caller waits only for a slot, and a slot is busy for at most (1 + reward.max_retries) x (the time to load plus
reward.timeout_s), so nobody waits forever; how many wait, and for how long, is counted. A verifier that gives no score is
a failure of the infrastructure and never a reward: the caller gets `VerifierError`, not zero. Everything here runs on one
event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from workers.config import Config, RewardConfig, SandboxConfig
from workers.config.judge import JUDGE, JudgeConfig
from workers.reward.judges.judge_client import Judge, JudgeError
from workers.reward.pool.messages import PYTHON_TOOL, Execute, Load, Request, Score, Settings, described
from workers.reward.pool.process_handle import REAP_TIMEOUT_S, NoAnswerError, RewardProcess
from workers.reward.verifiers.registry import check_name, composed, parts

LOG = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class VerifierError(RuntimeError):
    """A verifier gave no score, or a program could not be run. Its text says whose doing it is and why; it is not a judgement of the completion.

    `cause`: what the last attempt failed with. `hopeless`: none has ever given an answer here.
    """

    def __init__(self, text: str, cause: str = "", hopeless: bool = False) -> None:
        super().__init__(text)
        self.cause, self.hopeless = cause or text, hopeless


class _Slot:
    """A place for one process; empty after a failure, until the next request fills it."""

    def __init__(self) -> None:
        self.process: RewardProcess | None = None


class RewardPool:
    """`async with RewardPool(config) as pool: score = await pool.score(...)`; raises `ConfigError` for an unknown verifier.

    Counters since the start, for metrics: `num_scored` (scores given), `num_executed` (programs run), `num_failed` (`VerifierError`s raised),
    `num_late` (attempts
    that had no answer in time), `num_killed` (processes that were killed, or found dead, and replaced), `busy_s` (seconds of processes at work),
    `wait_s` (seconds that requests have waited for a process). `num_waiting`: requests that wait now; many of them mean that there are too few
    processes.
    """

    def __init__(self, config: RewardConfig, sandbox: SandboxConfig | None = None) -> None:
        check_name(config.verifier)
        self._config = config
        # What a process is told can be seen by all users of this machine, and is no longer than an argument may be.
        self._settings = Settings(dataclasses.replace(config, judge=JudgeConfig()), sandbox or SandboxConfig())
        self.judge = Judge(config.judge)
        self._slots = [_Slot() for _ in range(config.num_processes)]
        self._free: asyncio.Queue[_Slot] = asyncio.Queue()
        for slot in self._slots:
            self._free.put_nowait(slot)
        self._disposals: set[asyncio.Task[None]] = set()
        self._closed = False
        self.num_scored = self.num_executed = self.num_failed = self.num_late = self.num_killed = self.num_waiting = 0
        self.busy_s = self.wait_s = 0.0

    async def __aenter__(self) -> Self:
        try:
            for slot in self._slots:
                slot.process = RewardProcess(self._settings)  # returns at once: they start up side by side
        except OSError:
            await self.close()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def waiting_for(self) -> str:
        """What requests wait for beyond processes that are busy: nothing, here."""
        return ""

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
        score = await self._ask(Score(verifier, prompt, completion, reference), RewardProcess.score)
        self.num_scored += 1
        return score

    async def execute(self, code: str) -> str:
        """What the program `code`, run in the sandbox, prints, or how it fails, as the model is to see it.

        Raises `VerifierError` if it could not be run, retries included, or if the pool is closed. Cancelling kills the process at work.
        """
        text = await self._ask(Execute(code), RewardProcess.execute)
        self.num_executed += 1
        return text

    async def load(self, function: str) -> None:
        """Have a process import a verifier, or the Python tool (`PYTHON_TOOL`). Raises `ConfigError` if there is no such verifier, and
        `VerifierError` with the cause if it cannot be imported on this node."""
        check_name(function)
        if function == JUDGE:
            look(self.judge)
        else:
            await self._ask(Load(function), RewardProcess.load)

    async def _ask(self, request: Request, ask: Callable[[RewardProcess, Any], Awaitable[Answer]]) -> Answer:
        slot = await self._take()
        try:
            return await self._answer(slot, request, ask)
        finally:
            self._free.put_nowait(slot)

    async def _take(self) -> _Slot:
        """Wait for a free slot; first come, first served."""
        self._check_open()
        start = time.monotonic()
        self.num_waiting += 1
        try:
            return await self._free.get()
        finally:
            self.num_waiting -= 1
            self.wait_s += time.monotonic() - start

    async def _answer(self, slot: _Slot, request: Request, ask: Callable[[RewardProcess, Any], Awaitable[Answer]]) -> Answer:
        cause = remedy = ""
        num_attempts = 1 + self._config.max_retries
        for _ in range(num_attempts):
            self._check_open()
            try:
                return await self._attempt(slot, request, ask)
            except (NoAnswerError, OSError) as error:  # OSError: no process could be started
                cause, remedy = str(error), getattr(error, "remedy", "Look at this node: no process could be started")
                self.num_late += getattr(error, "late", False)
                LOG.warning("%s gave no answer: %s", described(request), cause)
        self._check_open()
        self.num_failed += 1
        tried = f"{num_attempts} attempts; the last" if num_attempts > 1 else "its only attempt"
        raise VerifierError(f"{described(request)} gave no answer in {tried}: {cause}\n{remedy}", cause,
                            hopeless=isinstance(request, Score) and not self.num_scored)

    async def _attempt(self, slot: _Slot, request: Request, ask: Callable[[RewardProcess, Any], Awaitable[Answer]]) -> Answer:
        if slot.process is not None and not slot.process.is_usable():
            self._replace(slot)
        if slot.process is None:
            slot.process = RewardProcess(self._settings)
        start = time.monotonic()
        finished = False
        try:
            answer = await ask(slot.process, request)
            finished = True
            return answer
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
        """Kill all processes with everything they started and reap them. Whoever waits for an answer gets `VerifierError`."""
        if self._closed:
            return
        self._closed = True
        await self.judge.close()
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


def look(judge: Judge) -> None:
    """Look whether a judge can be asked from here. Raises `VerifierError`."""
    try:
        judge.check()
    except JudgeError as error:
        raise VerifierError(str(error), hopeless=error.hopeless) from error


def functions(config: Config) -> list[str]:
    """The verifiers and their parts, each alone; and the Python tool, where the workflow's models write programs."""
    tool = [PYTHON_TOOL] if config.workflow.name == "python_tool" else []
    verifiers = config.data.verifiers(config.reward.verifier)
    return [*dict.fromkeys(part for name in verifiers for part in parts(composed(name, config.reward.parts))), *tool]

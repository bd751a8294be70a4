"""The process of a `verifiers` environment: started by the first episode of a worker, shared by all, gone with the worker's event loop.

    episode --play(task, url, key)--> stdin --> environment_program.py, by workflow.env_python --HTTP--> endpoint
            <--reward---------------- stdout <--

One that dies fails the episodes it had, and the next episode starts another. Its standard error is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from workers.config import Config, ConfigError, WorkflowConfig
from workers.rollout.workflows.agents.agent_program import ProgramFailed, end, failure, start
from workers.run.files import write_atomic
from workers.run.folder import RunFolder

PROGRAM = Path(__file__).with_name("environment_program.py")
STARTS_S, GIVEN_UP_S, ENDS_S = 300.0, 30.0, 5.0
"""So long a process may take to load its environment; to give up an episode; and to go once it says nothing more, before it is ended."""
MAX_TASKS = 100_000
"""So many of an environment's tasks are taken, which may be endless."""


class EnvironmentProcess:
    """A running process. `ended`: it is none any more, or ends."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self.ended = process, False
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live())

    @classmethod
    async def start(cls, config: WorkflowConfig) -> EnvironmentProcess:
        """One that has loaded its environment. Raises `ProgramFailed`."""
        started = cls(await start(_command(config, "serve")))
        done, _ = await asyncio.wait([started._ready], timeout=STARTS_S)
        if not done:
            started._living.cancel()
            raise ProgramFailed(f"has not loaded workflow.env={config.env!r} in {STARTS_S:g} s")
        started._ready.result()
        return started

    async def play(self, task: dict[str, Any], url: str, key: str) -> float:
        """The reward of an episode of `task`, whose model is asked at `url` with `key`. Raises `ProgramFailed`."""
        number = next(self._numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await self._tell({"call": number, "task": task, "url": url, "key": key})
            told = await call
        except asyncio.CancelledError:
            await self._give_up(number)
            raise
        finally:
            self._calls.pop(number, None)
        if "error" in told:
            raise ProgramFailed(told["error"])
        return told["reward"]

    async def _give_up(self, number: int) -> None:
        ended = self._calls[number] = asyncio.get_running_loop().create_future()
        with contextlib.suppress(ProgramFailed, TimeoutError):
            async with asyncio.timeout(GIVEN_UP_S):
                await self._tell({"call": number, "cancel": True})
                await ended
                return
        self.ended = True  # it hangs: the next episode has another one
        self._living.cancel()

    async def _tell(self, said: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if self.ended:
            raise ProgramFailed(_GONE)
        self._process.stdin.write(json.dumps(said).encode() + b"\n")
        try:
            await self._process.stdin.drain()
        except ConnectionError as error:
            raise ProgramFailed(_GONE) from error

    async def _live(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                told = json.loads(line)
                waiting = self._ready if "ready" in told else self._calls.get(told["call"])
                if waiting is not None and not waiting.done():
                    waiting.set_result(told)
            with contextlib.suppress(TimeoutError):  # how it ended says who has ended it
                await asyncio.wait_for(self._process.wait(), ENDS_S)
        finally:
            self.ended = True
            await end(self._process)
            for waiting in (self._ready, *self._calls.values()):
                if not waiting.done():
                    waiting.set_exception(failure(self._process.returncode)(_GONE))
            self._ready.exception()  # somebody has it, or nobody waits


_GONE = "lost its environment: the process that ran it has ended. The worker's log has what it said last"
_environments: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[EnvironmentProcess]] = WeakKeyDictionary()


async def shared_environment(config: WorkflowConfig) -> EnvironmentProcess:
    """The process of this event loop's episodes. Raises `ProgramFailed`."""
    loop = asyncio.get_running_loop()
    starting = _environments.get(loop)
    if starting is None or (starting.done() and (starting.cancelled() or starting.exception() is not None or starting.result().ended)):
        starting = _environments[loop] = loop.create_task(EnvironmentProcess.start(config))
    return await asyncio.shield(starting)


def score_of(reward: float, config: WorkflowConfig) -> float:
    """The score in [0, 1] of an environment's reward, which workflow.env_rewards bounds. Raises `ConfigError` for one outside."""
    low, high = config.env_rewards
    if not low <= reward <= high:
        raise ConfigError(f"workflow.env={config.env!r} gave a reward of {reward:g}: outside workflow.env_rewards=[{low:g}, {high:g}], which become "
                          "scores from 0 to 1. Give the least and the greatest reward there")
    return (reward - low) / (high - low)


def bring_tasks(whole: Config, run: RunFolder) -> None:
    """Write the environment's tasks to the run folder, as the data set of the run. Raises `ConfigError` where it cannot be loaded."""
    config = whole.workflow
    command = [*_command(config, "tasks"), str(MAX_TASKS)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=STARTS_S)
    except OSError as error:
        raise ConfigError(f"workflow.env_python={config.env_python!r}: cannot be run ({error.strerror}). Give the path of a Python") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"workflow.env={config.env!r}: has not been loaded, with its tasks, in {STARTS_S:g} s") from error
    if done.returncode:
        raise ConfigError(f"workflow.env={config.env!r}: {done.stderr.decode(errors='replace').strip()[-700:]}")
    write_atomic(run.environment_tasks, done.stdout)
    whole.data.path = str(run.environment_tasks)


def _command(config: WorkflowConfig, what: str) -> list[str]:
    return [config.env_python or sys.executable, str(PROGRAM), what, json.dumps({"env": config.env, "args": config.env_args})]

"""An agent that is a program of its own: started for one episode, told by environment and stdin, gone with it.

    task, as JSON --stdin--> process_guard.py --> program --HTTP--> endpoint        OPENAI_BASE_URL, OPENAI_API_KEY in its environment
                             stdout, stderr --> their end, for an error
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from workers.rollout.workflows.agents import process_guard
from workers.rollout.workflows.agents.process_guard import FOR_THE_WORKER, NODE_FAILED
from workers.run.processes import describe_exit

GUARD = Path(process_guard.__file__)
OUTPUT_BYTES = 700
"""So much of a program's output is kept: its end."""
ENDS_S = 30.0
"""So long a program and all that it has started may take to be gone, once told."""


class ProgramFailed(Exception):
    """An agent's program ended with an error; the text says how, with the end of its output."""


class NodeFailed(ProgramFailed):
    """The same where that says nothing of the agent: with `NODE_FAILED`, as where SLURM has told all of the job to end."""


async def run_program(command: list[str], task: dict[str, Any], url: str, key: str) -> None:
    """Run an agent's program to its end; it is killed where this is cancelled. Raises `ProgramFailed`, `NodeFailed`."""
    environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    process = await start(command, env=environment, stderr=asyncio.subprocess.STDOUT)
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.close()
        output = await _end_of(process.stdout)
        status = await process.wait()
    finally:
        await end(process)
    if status != 0:
        shown = output.decode(errors="replace").strip()
        raise failure(status)(f"{_exit(status)}{'; its output ends:' + chr(10) + shown if shown else ', without output'}")


def failure(status: int | None) -> type[ProgramFailed]:
    """What an exit status of the guard says; it may be killed itself while it starts."""
    return NodeFailed if status in (NODE_FAILED, *(-number for number in FOR_THE_WORKER)) else ProgramFailed


async def start(command: list[str], **keywords: Any) -> asyncio.subprocess.Process:
    """Start a program under the guard, with pipes as its input and output; `keywords`: of asyncio.create_subprocess_exec. `end` ends it."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command, process_group=0,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, **keywords)


async def _end_of(stream: asyncio.StreamReader) -> bytes:
    kept = b""
    while part := await stream.read(1 << 16):
        kept = (kept + part)[-OUTPUT_BYTES:]
    return kept


async def end(process: asyncio.subprocess.Process) -> None:
    """Have the guard end everything; kill what is left where it does not answer."""
    if process.returncode is None:
        process.send_signal(signal.SIGHUP)
        try:
            async with asyncio.timeout(ENDS_S):
                await process.wait()
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, TimeoutError):
                raise
            await process.wait()


def _exit(status: int) -> str:
    return describe_exit(128 - status if status > 128 and status <= 128 + signal.NSIG else status)

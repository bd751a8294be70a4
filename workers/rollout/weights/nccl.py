"""The version of NCCL that inference servers have: NCCL forms no group of two versions, and does not say so, but hangs or breaks."""

from __future__ import annotations

import asyncio
import json
import sys

from workers.run import gpus, gpus_seen

SEEN_S = 120.0
"""Within this time an interpreter has imported torch, on a shared file system too."""


def difference(trainers: str, servers: str) -> str:
    """Why these versions form no group, with the remedy; '' where they are one. Pure."""
    if not servers:
        return f"the trainer has NCCL {trainers}, and engine.python has not said which the servers here have. Try {gpus_seen.__file__} in it"
    return "" if trainers == servers else (
        f"the trainer has NCCL {trainers}, and the servers here have {servers}: they form no group. Use one environment for both roles "
        "(constraints/gpu.txt), or weights=zmq")


async def version_of(python: str) -> str:
    """The version of NCCL that an interpreter's torch has ('': this one), '' where that cannot be told."""
    try:
        process = await asyncio.create_subprocess_exec(
            python or sys.executable, gpus_seen.__file__, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env=gpus.environment_of(python))
    except OSError:
        return ""
    try:
        async with asyncio.timeout(SEEN_S):
            said, _ = await process.communicate()
        return str(gpus.found(json.loads(said.splitlines()[-1])).nccl)
    except (TimeoutError, IndexError, ValueError):  # msgspec's errors are ValueErrors
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()

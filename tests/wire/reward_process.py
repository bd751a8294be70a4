"""A reward element without a coordinator, as a process of its own: `python -m tests.wire.reward_process RUN`. Prints where it serves."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from workers.config import RewardConfig, TransportConfig
from workers.messages.judging import ToElement
from workers.reward.pool.pool import RewardPool
from workers.reward.remote.service import RewardService
from workers.run.folder import RunFolder
from workers.run.processes import end_with_parent
from workers.transport.element_sockets import ElementSocket


async def main() -> None:
    """Serve until killed."""
    socket = ElementSocket(RunFolder(Path(sys.argv[1])), TransportConfig(), ToElement)
    async with RewardPool(RewardConfig(timeout_s=60.0)) as pool:
        print(socket.endpoint, flush=True)
        await RewardService(socket, pool).serve()


if __name__ == "__main__":
    end_with_parent(os.getppid())
    asyncio.run(main())

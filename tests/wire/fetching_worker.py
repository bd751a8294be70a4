"""A rollout worker without engines, as a process of its own: registers, fetches what is announced, serves it on, "loads" it, says so.

Arguments: run folder, node's name, weights.dir, the config's changes as JSON, and `gated` if it is to load only when told so (a line on stdin).
Prints `arrived BYTES`, `loading VERSION`, `held VERSION WAY DIGEST`; ends with its stdin.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tests.wire.weight_nodes import read
from workers.config import Config, Transport
from workers.messages.from_worker import Heartbeat
from workers.messages.parts import Role, Version, WorkerStatus
from workers.rollout.weights.fetch import WeightFetch
from workers.rollout.weights.updates import WeightHolder
from workers.run.digests import digest_of
from workers.run.folder import RunFolder
from workers.transport.peer import Peer


def make_config(folder: str, changes: dict[str, object]) -> Config:
    """The config of a node whose store is below `folder`."""
    config = Config()
    config.transport.heartbeat_s = 0.1
    config.weights.dir, config.weights.timeout_s = folder, 60.0
    for name, value in changes.items():
        setattr(config.weights, name, Transport(value) if name == "transport" else value)
    return config


class Engines:
    """What stands in for the servers: they hold what they were last told to load."""

    def __init__(self, holder: WeightHolder, fetch: WeightFetch, told: asyncio.Queue[str] | None) -> None:
        self.held: Version | None = None
        self._holder, self._fetch, self._told = holder, fetch, told

    async def catch_up(self) -> None:
        """Load the newest weights."""
        newest = self._holder.newest
        assert newest is not None
        print("loading", newest.version, flush=True)
        if self._told is not None:
            await self._told.get()
        print("held", newest.version, self._fetch.via, digest_of(read(newest.folder).tobytes()), flush=True)
        self.held = newest.version


async def work(run: RunFolder, config: Config, gated: bool) -> None:
    """Work until stdin ends."""
    told: asyncio.Queue[str] = asyncio.Queue()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hear() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(told.put_nowait, line)
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=hear, daemon=True).start()
    peer: Peer
    fetch = WeightFetch(run, config, lambda message: peer.send(message), lambda: peer.in_touch)
    holder = WeightHolder(fetch, lambda: peer.beat(), lambda: peer.in_touch)
    engines = Engines(holder, fetch, told if gated else None)

    def announced(announcement) -> None:
        fetch.announced(announcement)
        holder.announce(announcement)

    def beat() -> Heartbeat:
        status = WorkerStatus(fetch.waiting_for, weights_via=fetch.via, fetch_bytes=fetch.fetch_bytes, num_fallbacks=fetch.num_fallbacks)
        return Heartbeat(held=engines.held, fetching=holder.fetching, status=status, capacity=8)

    async def say_what_arrives() -> None:
        said = 0
        while True:
            arrived = fetch._streaming.arrived if fetch._streaming else 0
            if arrived != said:
                print("arrived", arrived, flush=True)
            said = arrived
            await asyncio.sleep(0.02)

    peer = Peer(run, config.transport, Role.rollout, 60.0, heartbeat=beat, on_message=fetch.take, on_announcement=announced, serves=fetch.endpoint)
    await peer.connect()
    parts = [asyncio.ensure_future(part) for part in (peer.serve(), holder.follow(engines), say_what_arrives(), over.wait())]  # type: ignore[arg-type]
    done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    for part in parts:
        part.cancel()
    await asyncio.gather(*parts, return_exceptions=True)
    await fetch.close()
    await peer.leave()
    for part in done:
        part.result()


if __name__ == "__main__":
    run_path, name, folder, changes = sys.argv[1:5]
    socket.gethostname = lambda: name
    with suppress(KeyboardInterrupt):
        asyncio.run(work(RunFolder(Path(run_path)), make_config(folder, json.loads(changes)), "gated" in sys.argv[5:]))

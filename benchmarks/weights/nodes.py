"""The processes of benchmarks.weights that hold weights: a trainer's and any number of nodes, each with a store of its own.

    python -m benchmarks.weights.nodes trainer RUN SECURITY STREAMS PARENT     describes the files of a version and serves them
    python -m benchmarks.weights.nodes node RUN SECURITY STREAMS STORE PARENT  fetches a version into its store, and serves it on as it arrives
    python -m benchmarks.weights.nodes disk PARENT                     writes a version as files, or reads and checks one

What a run's processes do for each new version is done here by the same calls; the coordinator's part, who fetches from whom, comes with the
order.
"""

from __future__ import annotations

import mmap
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.children import answer_orders
from workers.config import Security, TransportConfig, WeightsConfig
from workers.messages.parts import Announcement, Version
from workers.run.digests import digest_of
from workers.run.files import sync
from workers.run.folder import RunFolder
from workers.transport.weights.fetcher import FetchProgress, fetch
from workers.transport.weights.server import WeightKeys, WeightServer
from workers.weights.manifest import MANIFEST, Manifest, describe_files, make_manifest
from workers.weights.store import NodeStore

MIB = 1 << 20
LOOPBACK = TransportConfig(interface="127.0.0.1")


def weights_config(security: str, streams: str) -> WeightsConfig:
    """The defaults, with this security and so many streams."""
    return WeightsConfig(security=Security(security), streams=int(streams))


class Trainer:
    """Serves versions out of given folders."""

    def __init__(self, run: RunFolder, config: WeightsConfig) -> None:
        self.config = config
        self.server = WeightServer(LOOPBACK, config, WeightKeys.read(run))

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Publish `folder` as `version`, or withdraw it; tells the counters either way."""
        version = Version.parse(order["version"])
        started, digest = time.perf_counter(), ""
        if "folder" in order:
            folder = Path(order["folder"])
            names = sorted(path.name for path in folder.iterdir())
            content = Manifest(version, self.config.chunk_mb * MIB, describe_files(folder, names, self.config.chunk_mb * MIB)).encode()
            self.server.offer(version, folder, content)
            digest = digest_of(content)
        else:
            self.server.withdraw(version)
        return {"seconds": time.perf_counter() - started, "digest": digest, "bytes_sent": self.server.counters.bytes_sent}


class Node:
    """Fetches versions, and hands them on."""

    def __init__(self, run: RunFolder, config: WeightsConfig, store: Path) -> None:
        self.config, self.keys, self.store = config, WeightKeys.read(run), NodeStore(store)
        self.server = WeightServer(LOOPBACK, config, self.keys)

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """`expect` a version; fetch it from `parents` and `sources`; remove it."""
        version = Version.parse(order["version"])
        if "expect" in order:
            self.server.expect(version)
            return {}
        if "sources" not in order:
            self.server.withdraw(version)
            shutil.rmtree(self.store.held(version))
            return {}
        started = time.perf_counter()
        progress: list[FetchProgress] = []
        announcement = Announcement(version, "", order["digest"], order["sources"])
        folder = fetch(announcement, order["parents"], self.store, self.config, self.keys, cancelled=threading.Event(),
                       report=progress.append, on_begin=self.server.offer_incoming)
        seconds = time.perf_counter() - started
        self.server.offer(version, folder)
        last = progress[-1]
        return {"seconds": seconds, "received": last.received, "num_corrupt": last.num_corrupt, "failures": last.failures}


def disk(order: dict[str, Any]) -> dict[str, Any]:
    """`write`: files of that folder to `folder`, as far as the storage, with their manifest. Otherwise read `folder` and check all digests."""
    started, folder = time.perf_counter(), Path(order["folder"])
    if "write" in order:
        shutil.copytree(order["write"], folder)
        make_manifest(folder, Version(1, 1))
        for path in folder.iterdir():
            sync(path)
    else:
        check(folder, Manifest.decode((folder / MANIFEST).read_bytes()))
    return {"seconds": time.perf_counter() - started}


def check(folder: Path, manifest: Manifest) -> None:
    """Read every chunk from the storage itself, as a node that has nothing of it in its memory would, and check its digest."""
    buffer = memoryview(mmap.mmap(-1, manifest.chunk_bytes))  # aligned, as O_DIRECT wants it
    for entry in manifest.files:
        descriptor = os.open(folder / entry.name, os.O_RDONLY | os.O_DIRECT)
        for index, digest in enumerate(entry.chunks):
            size = os.preadv(descriptor, [buffer], index * manifest.chunk_bytes)
            assert digest_of(buffer[:size]) == digest, f"{entry.name}: chunk {index} is not what was written"
        os.close(descriptor)


def main() -> None:
    """Answer orders until there are no more."""
    kind, *arguments, _ = sys.argv[1:]
    if kind == "disk":
        answer_orders(disk)
        return
    run, config = RunFolder(Path(arguments[0])), weights_config(*arguments[1:3])
    served: Trainer | Node = Trainer(run, config) if kind == "trainer" else Node(run, config, Path(arguments[3]))
    answer_orders(served.answer, endpoint=served.server.endpoint)
    served.server.close()
    if isinstance(served, Node):
        served.store.leave()


if __name__ == "__main__":
    main()

"""Nodes for tests of the weight transport: a trainer's server with versions, a worker's store and server, either of them in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from workers.config import TransportConfig
from workers.config.training import WeightsConfig
from workers.messages.parts import Announcement, Version
from workers.run.folder import RunFolder
from workers.transport.weights.fetcher import FetchProgress, fetch
from workers.transport.weights.messages import WeightKeys
from workers.transport.weights.server import WeightServer
from workers.weights.delta import make_deltas
from workers.weights.manifest import Manifest, describe_files, verify, write_manifest
from workers.weights.partial_version import Incoming
from workers.weights.store import NodeStore

PROJECT = Path(__file__).parents[2]
LOOPBACK = TransportConfig()
CONFIG = WeightsConfig(chunk_mb=1, timeout_s=60.0)
CHUNK = 4096  # bytes; far smaller than any chunk in earnest, so that a small version has many
NAMES = ["model-00000.safetensors", "model-00001.safetensors"]
WAIT_S = 60.0


class Origin:
    """A trainer rank's server, and the versions that it publishes: the files `names` of each."""

    def __init__(self, run: RunFolder, root: Path, config: WeightsConfig = CONFIG, names: Sequence[str] = NAMES) -> None:
        self.store, self.server, self.names = NodeStore(root), WeightServer(LOOPBACK, config, WeightKeys.read(run)), list(names)

    def write(self, version: Version, weights: np.ndarray) -> Path:
        """Write `weights` (uint16), shared out over the files."""
        return write(self.store.published(version), weights, self.names)

    def publish(self, version: Version, weights: np.ndarray, base: Version | None = None) -> Announcement:
        """Write, describe and offer a version; with its differences to `base`."""
        folder = self.write(version, weights)
        manifest = Manifest(version, CHUNK, describe_files(folder, self.names, CHUNK))
        digest, delta = write_manifest(folder, manifest), None
        if base is not None:
            delta = self.store.delta(folder)
            make_deltas(folder, self.store.published(base), base, self.names, delta, chunk_bytes=CHUNK, width=2)
        self.server.offer(version, folder, manifest.encode(), delta)
        return Announcement(version, "", digest, [self.server.endpoint])

    def close(self) -> None:
        self.server.close()
        self.store.leave()


class Worker:
    """A rollout worker's part: fetches into its node's store, and serves it on."""

    def __init__(self, run: RunFolder, root: Path, config: WeightsConfig = CONFIG) -> None:
        self.keys, self.store, self.config = WeightKeys.read(run), NodeStore(root), config
        self.server = WeightServer(LOOPBACK, config, self.keys)
        self.endpoint = self.server.endpoint
        self.cancelled = threading.Event()
        self.progress = FetchProgress()

    def fetch(self, announcement: Announcement, parents: Sequence[str] = (), report: Callable[[FetchProgress], None] = lambda _: None,
              on_begin: Callable[[Incoming], None] | None = None) -> Path:
        """Fetch and verify; `progress` is how it went."""
        def note(progress: FetchProgress) -> None:
            self.progress = progress
            report(progress)

        self.server.expect(announcement.version)
        folder = fetch(announcement, parents, self.store, self.config, self.keys, cancelled=self.cancelled, report=note,
                       on_begin=on_begin or self.server.offer_incoming)
        verify(folder, announcement.version, announcement.digest)
        return folder

    def close(self) -> None:
        self.server.close()
        self.store.leave()


class Process:
    """A process of its own, that runs `code` with a `worker`, prints, and waits to be told to end, or to be killed."""

    def __init__(self, run: RunFolder, root: Path, code: str, *, timeout_s: float = CONFIG.timeout_s) -> None:
        script = f"""
import sys
from pathlib import Path
from tests.wire.weight_nodes import *
worker = Worker(RunFolder(Path({str(run.path)!r})), Path({str(root)!r}), WeightsConfig(chunk_mb=1, timeout_s={timeout_s}))
print(worker.endpoint, flush=True)
{code}
sys.stdin.readline()
worker.close()
"""
        self.process = subprocess.Popen([sys.executable, "-c", script], cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoint = self.line()

    def line(self) -> str:
        """The next line that it prints."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)

    def end(self) -> None:
        """Let it end in order."""
        self.process.communicate("\n", timeout=WAIT_S)
        assert self.process.returncode == 0


def make_weights(seed: int, size: int = 100_000) -> np.ndarray:
    """`size` bf16 parameters, as uint16."""
    weights = np.random.default_rng(seed).standard_normal(size).astype(np.float32) * 0.02
    return (weights.view(np.uint32) >> 16).astype(np.uint16)


def step(weights: np.ndarray, seed: int) -> np.ndarray:
    """A training step: some parameters change by an ulp."""
    rng = np.random.default_rng(seed)
    ulps = rng.choice(np.array([0, 1, -1], np.int16), len(weights), p=[0.9, 0.05, 0.05])
    return weights + ulps.view(np.uint16)


def write(folder: Path, weights: np.ndarray, names: Sequence[str] = NAMES) -> Path:
    """Make `folder`, with `weights` shared out over files."""
    folder.mkdir(mode=0o700)
    for name, part in zip(names, np.array_split(weights, len(names)), strict=True):
        (folder / name).write_bytes(part.tobytes())
    return folder


def read(folder: Path) -> np.ndarray:
    """The weights of a version."""
    return np.concatenate([np.fromfile(folder / name, np.uint16) for name in NAMES])

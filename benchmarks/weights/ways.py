"""The ways to the receivers that benchmarks.weights compares: Headway's transport, plain streams, files. Each stays; a turn is one version."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import Child
from workers.config import WeightsConfig
from workers.coordinator.weights.fanout_tree import Distribution
from workers.messages.parts import Version
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys

CHUNK_BYTES = WeightsConfig().chunk_mb << 20
SHARD_BYTES = 1 << 29


@dataclass(frozen=True)
class Place:
    """Where a measurement happens: `memory` for what nodes hold, `disk` for shared storage, `source` with the trainer's files."""

    memory: Path
    disk: Path
    source: Path

    def sizes(self) -> dict[str, int]:
        """Bytes of each file."""
        return {path.name: path.stat().st_size for path in self.source.iterdir()}


def make_weights(folder: Path, size: int) -> None:
    """Random files of `size` bytes together, in shards."""
    folder.mkdir()
    for number, start in enumerate(range(0, size, SHARD_BYTES)):
        with (folder / f"model-{number:05d}.safetensors").open("wb") as file:
            for offset in range(start, min(size, start + SHARD_BYTES), CHUNK_BYTES):
                file.write(os.urandom(min(CHUNK_BYTES, start + SHARD_BYTES - offset, size - offset)))


def parents_of(endpoints: list[str], version: Version) -> list[list[str]]:
    """From whom each receiver fetches before the trainer, as the coordinator tells them."""
    distribution = Distribution(WeightsConfig().fanout)
    distribution.announced(version)
    return [distribution.ask(version, str(number).encode(), f"node{number}", endpoint).endpoints for number, endpoint in enumerate(endpoints)]


class Zmq:
    """A trainer and nodes that stay; each turn is another version."""

    def __init__(self, stack: contextlib.ExitStack, place: Place, receivers: int, security: str, streams: int) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place.memory)))
        run = RunFolder.create(folder / "run")
        make_keys(run)
        module = "benchmarks.weights.nodes"
        self._place, self._num_turns = place, 0
        self._trainer = stack.enter_context(Child(module, "trainer", str(run.path), security, str(streams)))
        self._nodes = [stack.enter_context(Child(module, "node", str(run.path), security, str(streams), str(folder / f"node{number}")))
                       for number in range(receivers)]

    def turn(self) -> dict[str, float]:
        """One version from the trainer to all nodes."""
        self._num_turns += 1
        version = Version(1, self._num_turns)
        published = self._trainer.ask(version=str(version), folder=str(self._place.source))
        for node in self._nodes:
            node.ask(version=str(version), expect=True)
        for node, parents in zip(self._nodes, parents_of([node.ready["endpoint"] for node in self._nodes], version), strict=True):
            node.order(version=str(version), digest=published["digest"], sources=[self._trainer.ready["endpoint"]], parents=parents)
        fetched = [node.answer() for node in self._nodes]
        assert not any(each["num_corrupt"] or each["failures"] for each in fetched), fetched
        egress = self._trainer.ask(version=str(version))["bytes_sent"] - published["bytes_sent"]
        for node in self._nodes:
            node.ask(version=str(version))
        return {"seconds": max(each["seconds"] for each in fetched), "publish_s": published["seconds"],
                "egress_copies": egress / sum(self._place.sizes().values())}


class Plain:
    """Plain streams from one sender to `receivers` at once."""

    def __init__(self, stack: contextlib.ExitStack, place: Place, receivers: int) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place.memory)))
        self._place = place
        self._sender = stack.enter_context(Child("benchmarks.weights.plain", "serve", str(place.source)))
        self._receivers = [stack.enter_context(Child("benchmarks.weights.plain", "receive")) for _ in range(receivers)]

    def turn(self, threads: int) -> float:
        """Seconds until the last one has everything."""
        folders = [self._folder / str(number) for number in range(len(self._receivers))]
        for receiver, folder in zip(self._receivers, folders, strict=True):
            receiver.order(port=self._sender.ready["port"], sizes=self._place.sizes(), folder=str(folder), chunk_bytes=CHUNK_BYTES, threads=threads)
        seconds = max(receiver.answer()["seconds"] for receiver in self._receivers)
        for folder in folders:
            shutil.rmtree(folder)
        return seconds

    def bare(self, streams: int) -> float:
        """Seconds until the last one has received everything over so many streams, and kept nothing."""
        for receiver in self._receivers:
            receiver.order(port=self._sender.ready["port"], sizes=self._place.sizes(), chunk_bytes=CHUNK_BYTES, streams=streams)
        return max(receiver.answer()["seconds"] for receiver in self._receivers)


class Disk:
    """A writer and readers of one folder."""

    def __init__(self, stack: contextlib.ExitStack, place: Place, receivers: int) -> None:
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place.disk))) / "version"
        self._place = place
        self._writer = stack.enter_context(Child("benchmarks.weights.nodes", "disk"))
        self._readers = [stack.enter_context(Child("benchmarks.weights.nodes", "disk")) for _ in range(receivers)]

    def turn(self) -> tuple[float, float]:
        """Seconds of writing, and until the last reader has read and checked it."""
        written = self._writer.ask(folder=str(self._folder), write=str(self._place.source))
        for reader in self._readers:
            reader.order(folder=str(self._folder))
        seconds = max(reader.answer()["seconds"] for reader in self._readers)
        shutil.rmtree(self._folder)
        return written["seconds"], seconds

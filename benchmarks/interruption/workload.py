"""Requests that keep an engine busy, for benchmarks.interruption: their lengths, the connection to the engine, versions, the slots that they fill."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import random
import shutil
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from benchmarks.engine.child import EngineChild
from benchmarks.engine.models import make_model
from workers.messages.parts import Version
from workers.rollout.engines.client import EngineClient
from workers.run.paths import MEMORY

SIGMA = 0.8


@dataclass(frozen=True)
class Workload:
    """Requests: prompts of 16 to 64 tokens, answers of lognormal length, cut at `longest` tokens."""

    slots: int
    longest: int
    turns: float
    vocab_size: int

    def lengths(self, seed: int) -> Iterator[int]:
        """Endless answer lengths."""
        draw = random.Random(seed)
        while True:
            yield max(4, min(self.longest, round(self.longest / 4 * draw.lognormvariate(0.0, SIGMA))))

    def requests(self, seed: int) -> Iterator[tuple[list[int], int]]:
        """Endless (prompt, answer length)."""
        draw, lengths = random.Random(seed + 1), self.lengths(seed)
        while True:
            yield [draw.randrange(3, self.vocab_size) for _ in range(draw.randint(16, 64))], next(lengths)

    @property
    def mean_length(self) -> float:
        """Of the answers, in tokens."""
        lengths = self.lengths(0)
        return statistics.mean(next(lengths) for _ in range(20_000))

    @property
    def tokens_per_update(self) -> int:
        """Tokens of finished requests from one version to the next."""
        return round(self.turns * self.slots * self.mean_length)


def most_gained(workload: Workload, num_updates: int = 200) -> float:
    """The ratio to expect of a device on which a decode step takes equally long however many requests take part, and an update no time.

    Slots that never wait give a token each a step. Here time counts steps, and no request begins from when an update is due until all
    that run have ended.
    """
    lengths, due = workload.lengths(0), workload.tokens_per_update
    finished, now, wanted = 0, 0, due
    running = [(length, length) for length in (next(lengths) for _ in range(workload.slots))]  # (end, length)
    heapq.heapify(running)
    while wanted <= num_updates * due:
        now, length = heapq.heappop(running)
        finished += length
        if finished < wanted:
            length = next(lengths)
            heapq.heappush(running, (now + length, length))
        elif not running:
            wanted += due
            running = [(now + length, length) for length in (next(lengths) for _ in range(workload.slots))]
            heapq.heapify(running)
    return workload.slots / (finished / now)


class Engine:
    """The running engine: requests by HTTP, and the weights that it is to load, in turn."""

    def __init__(self, session: aiohttp.ClientSession, client: EngineClient, process: psutil.Process, folders: list[Path]) -> None:
        self._session, self._client, self._process, self._folders = session, client, process, folders
        self._num_updates = 0

    @staticmethod
    @contextlib.asynccontextmanager
    async def connect(child: EngineChild, folders: list[Path]) -> AsyncIterator[Engine]:
        """A connection to `child`."""
        headers, client = {"Authorization": f"Bearer {child.api_key}"}, EngineClient(child.base_url, child.api_key, 3600.0)
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=3600)
        async with aiohttp.ClientSession(child.base_url, headers=headers, connector=connector, timeout=timeout) as session:
            yield Engine(session, client, psutil.Process(child.process.pid), folders)
        await client.close()

    async def generate(self, prompt: list[int], length: int) -> None:
        """Exactly `length` tokens."""
        params = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
        async with self._session.post("/generate", json={"input_ids": prompt, "sampling_params": params, "return_logprob": True}) as reply:
            body = await reply.json()
            assert reply.status == 200 and len(body["output_ids"]) == length, body

    def cpu_s(self) -> float:
        """CPU time that it has used."""
        times = self._process.cpu_times()
        return times.user + times.system

    def threads_s(self) -> dict[int, float]:
        """The same by thread, to the nanosecond (/proc/PID/task/TID/schedstat)."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return {thread.id: int((tasks / str(thread.id) / "schedstat").read_text().split()[0]) / 1e9 for thread in self._process.threads()}

    async def info(self) -> dict:
        """Its counters."""
        async with self._session.get("/server_info") as reply:
            return await reply.json()

    async def pause(self, mode: str = "retract") -> None:
        """Stop; what runs is retracted, or stays in place."""
        await self._client.pause(mode)

    async def load(self, flush: bool = True) -> None:
        """Load the next version."""
        await self._client.update_weights(*self._next(), flush_cache=flush)

    def _next(self) -> tuple[Path, Version]:
        self._num_updates += 1
        return self._folders[self._num_updates % len(self._folders)], Version(1, self._num_updates)

    async def take_next(self, swap: str, mode: str) -> None:
        """Have it go on with the next version."""
        if swap == "overlap":
            await self._client.swap_weights(*self._next(), mode)
            return
        await self.pause(mode)
        await self.load(flush=mode == "retract")
        await self.resume()

    async def resume(self) -> None:
        """Go on."""
        await self._client.resume()


@dataclass
class Stream:
    """Keeps the engine's slots busy; `finished` counts the tokens of requests that have ended."""

    engine: Engine
    workload: Workload
    seed: int
    finished: int = 0
    running: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def slot(self, requests: Iterator[tuple[list[int], int]]) -> None:
        """One request after the other, while the gate is open."""
        while True:
            await self.gate.wait()
            prompt, length = next(requests)
            self.running += 1
            await self.engine.generate(prompt, length)
            self.running -= 1
            self.finished += length
            async with self.moved:
                self.moved.notify_all()

    @contextlib.asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Requests flow inside; afterwards those in flight are given up."""
        requests = self.workload.requests(self.seed)
        self.gate.set()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.slot(requests)) for _ in range(self.workload.slots)]
            yield
            for task in tasks:
                task.cancel()

    async def until(self, tokens: int) -> None:
        """Until so many tokens are finished."""
        async with self.moved:
            await self.moved.wait_for(lambda: self.finished >= tokens)

    async def drained(self) -> None:
        """Until nothing runs; the gate must be closed."""
        async with self.moved:
            await self.moved.wait_for(lambda: self.running == 0)


@contextlib.contextmanager
def versions(given: Path | None) -> Iterator[tuple[list[Path], int]]:
    """Folders of two versions of a model, by default a random Qwen3 of 7M parameters, in memory until this ends; and the size of its vocabulary."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None, prefix="headway-benchmark-") as temporary:
        model = given or Path(temporary) / "model"
        if given is None:
            make_model(model)
        yield _make_versions(model, Path(temporary)), json.loads((model / "config.json").read_text())["vocab_size"]


def _make_versions(model: Path, folder: Path) -> list[Path]:
    """Two versions of `model` below `folder`: itself, and each matrix a little off."""
    folders = [folder / "1", folder / "2"]
    for number, target in enumerate(folders):
        shutil.copytree(model, target, ignore=shutil.ignore_patterns("*.safetensors"))
        for file in model.glob("*.safetensors"):
            tensors = {name: tensor * (1 + 1e-3 * number) for name, tensor in load_file(file).items()}
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / file.name, metadata={"format": "pt"})
    return folders


def rounded(value: object) -> object:
    """For people: four digits."""
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value

"""An element of an evaluation alone: its engines, its verifiers, and the chunks of prompts that it has claimed.

    chunks.py --a chunk--> prompts --as many at once as the engines take--> judge.py --a line each--> chunks.py
       ^                                                                                                  |
       +--- nothing left to claim: wait, another element may go <-----------------------------------------+
    all chunks done --> result.py --> outcome.json: every element leaves

There is no coordinator, and no weights travel: elements share the run folder alone. Each of them looks once a second whether the run is over,
or is to be. On SLURM one that is told to leave takes no more prompts and finishes what it can in its time; the rest is another's. While the run
folder is full or away it waits (run.outage_minutes), and what is judged by then is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from workers.config import ClusterKind, Config
from workers.data.prompt import Prompt
from workers.data.prompts import open_prompts
from workers.evaluation.chunks import Chunk, Chunks, divide
from workers.evaluation.element_liveness import Liveness, myself
from workers.evaluation.judge import Judging
from workers.evaluation.result import conclude
from workers.reward.pool.pool import RewardPool, functions
from workers.rollout.engines.engine_pool import Engines
from workers.rollout.engines.replica import spawner
from workers.rollout.engines.sampler import open_sampler
from workers.rollout.nodes.other_nodes import OtherNodes, place_here
from workers.rollout.workflows.rendering import text_of, texts_of_parts
from workers.rollout.workflows.workflow import Parts, Workflow
from workers.run.files import write_atomic
from workers.run.folder import RunFolder
from workers.run.outage import Result, patiently
from workers.run.processes import first_cause
from workers.slurm import job
from workers.slurm.termination import Termination, Told, WorkerEnded, drain_limit_s, listen, slurm_job

LOOK_S = 1.0
CLAIM_S, ASKED_EVERY_S = 5.0, 0.6
"""So often an element looks for chunks of others that have gone, and SLURM is asked by all of them together at most."""
WRITER = "evaluation"


class EvaluationElement:
    """One life of an element (workers/slurm/element.py: `Worker`)."""

    in_touch = True  # there is nobody else who could say what follows

    def __init__(self, run: RunFolder, config: Config) -> None:
        self.run, self.config = run, config
        self._on_slurm = config.cluster.kind is ClusterKind.slurm
        self._num_replicas = config.allocation.num_devices // config.allocation.replica_size
        self._prompts: list[Prompt] = []
        self._holder = myself(config)
        self._chunks = Chunks(run.evaluation, self._holder, Liveness(run, self._holder))
        self._mine: list[Chunk] = []
        self._waiting: deque[tuple[Chunk, int]] = deque()
        self._running: dict[asyncio.Task[bytes], tuple[Chunk, int]] = {}
        self._others: OtherNodes
        self._engines: Engines | None = None
        self._judging: Judging | None = None
        self._next_claim = self._next_look = 0.0
        self._leaving = ""

    async def work(self) -> Termination:
        """Judge until the run is over, or until told to leave. Raises what broke; what follows then is said here."""
        told = listen(self.config.cluster)

        def lost(reason: str) -> None:
            if not told.done():
                told.set_result(Told(reason, drain_limit_s(self.config.cluster, None)))

        self._others = OtherNodes(self.run, self.config, place_here(self.config), lost)
        try:
            return await self._work(told)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):
                self._failed(first_cause(error))
            raise
        finally:
            await self._others.close()
            self._tell(ended=True)

    async def _work(self, told: asyncio.Future[Told]) -> Termination:
        """Run engines and prompts until the first of them ends."""
        config = self.config
        self._prompts = open_prompts(config.data, config.reward, config.run.seed, Path(config.model.path)).heldout()
        self._chunks.chunks = divide(len(self._prompts), self._num_replicas)
        self._engines = engines = Engines(config, spawner(self.run, config, self._others), lambda: None, self._changed, serve_start=True)
        sampler = open_sampler(engines, Path(config.model.path))
        async with RewardPool(config.reward, config.sandbox) as rewards:
            workflow = Workflow(Parts(sampler, rewards, config.workflow, config.reward, config.engine.context_length, text_of(config),
                                      heldout=config.evaluation, texts=texts_of_parts(config)))
            self._judging = Judging(config, self._prompts, workflow, engines, sampler)
            living, judging = asyncio.create_task(engines.live()), asyncio.create_task(self._judge_all(told))
            try:
                for function in functions(config):
                    await rewards.load(function)
                await asyncio.wait([living, judging], return_when=asyncio.FIRST_COMPLETED)
                if living.done():
                    await living
                return await judging
            finally:
                for task in (living, judging, *self._running):
                    task.cancel()
                await asyncio.gather(living, judging, *self._running, return_exceptions=True)

    async def _judge_all(self, told: asyncio.Future[Told]) -> Termination:
        while (ending := await self._on_disk(partial(self._over, told))) is None:
            await self._fill()
            if not self._running and not self._waiting and await self._on_disk(self._chunks.complete):
                cause = await self._on_disk(partial(conclude, self.run, self.config, self._prompts, self._chunks))
                await self._on_disk(partial(self._end, cause))
                continue
            first: set[asyncio.Future[Any]] = {*self._running, told}
            await asyncio.wait(first, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            await self._collect()
        if ending.how == "drained":
            self._leaving = ending.cause
            self._tell()
            if self._running:
                await asyncio.wait(self._running, timeout=told.result().limit_s)
            await self._collect()
        return ending

    async def _on_disk(self, work: Callable[[], Result]) -> Result:
        """The result of what is read or written in the run folder, which may be away meanwhile. Raises OSError where that lasts too long."""
        return await asyncio.to_thread(patiently, self.run, work)

    # -- prompts -------------------------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        """Begin as many prompts as the engines have room for, and claim more where these are used up."""
        assert self._engines is not None and self._judging is not None
        size = self.config.evaluation.num_samples
        while self._engines.held is not None and (not self._running or (len(self._running) + 1) * size <= self._engines.capacity):
            if not self._waiting and not await self._claim():
                return
            if self._waiting:  # a chunk may be judged already
                chunk, index = self._waiting.popleft()
                self._running[asyncio.create_task(self._judging.judge(index))] = (chunk, index)

    async def _claim(self) -> bool:
        if time.monotonic() < self._next_claim:
            return False
        chunk = await self._on_disk(self._chunks.claim)
        if chunk is None:
            pause_s = max(CLAIM_S, ASKED_EVERY_S * self._num_replicas) * random.uniform(0.75, 1.25) if self._on_slurm else LOOK_S
            self._next_claim = time.monotonic() + pause_s
            return False
        self._mine.append(chunk)
        self._waiting += [(chunk, index) for index in chunk.prompts if index not in chunk.judged]
        return True

    async def _collect(self) -> None:
        """Write down what is judged. Raises what broke."""
        done = [task for task in self._running if task.done()]
        for task in sorted(done, key=lambda task: task.exception() is not None):  # first what is to be kept
            chunk, index = self._running.pop(task)
            await self._on_disk(partial(self._chunks.write, chunk, index, task.result()))
        if time.monotonic() >= self._next_look:
            self._tell()

    async def _changed(self) -> None:
        self._next_look = 0.0

    # -- what follows --------------------------------------------------------------------------------------------------

    def _over(self, told: asyncio.Future[Told]) -> Termination | None:
        """Why this element leaves now; None while it goes on."""
        stop = self.run.stop_requested()
        if self.run.ended() is None and stop is not None:
            self._end(f"stopped: {stop['reason']}", "drained" if stop["drain"] else "")
        elif self.run.launcher_is_gone():
            self._end("the launcher has died while attached; start with --detach for a run that outlives it")
        if (outcome := self.run.ended()) is not None:
            return Termination("finished", outcome["cause"])
        if not told.done():
            return None
        if not self._on_slurm:
            raise WorkerEnded(f"the element was told to end: {told.result().reason}")
        return Termination("drained", told.result().reason, told.result().signal)

    def _end(self, cause: str, state: str = "") -> None:
        """End the run, for all elements."""
        if self.run.end(cause, WRITER, state) and self._on_slurm:
            job.cancel_waiting_of(self.run)

    def _failed(self, cause: str) -> None:
        """On one machine a failure ends the run; on SLURM the next element follows, unless too many fail in a row."""
        if not self._on_slurm:
            self._end(f"an element of the evaluation (process {os.getpid()}) failed: {cause}")
            return
        try:
            times = self._chunks.crashed(cause)
        except OSError as error:
            print(f"this failure is not on record ({error}): {cause}", flush=True)
            return
        if times >= self.config.cluster.max_consecutive_crashes:
            self._end(f"elements have failed {times} times in a row (cluster.max_consecutive_crashes), the last time because: {cause}")

    def _tell(self, ended: bool = False) -> None:
        """Write what this element is doing, for people; as a worker in status.json. Where that cannot be written it is left for the next time."""
        self._next_look = time.monotonic() + LOOK_S
        engines = self._engines
        waits = "what it still judges" if self._leaving else engines.waiting_for if engines else "its start"
        status: dict[str, Any] = {
            "time": time.time(), "ended": ended, "num_prompts": len(self._prompts), "num_samples": self.config.evaluation.num_samples,
            "chunks": {str(chunk.number): len(chunk.judged) for chunk in self._mine},
            "tokens_generated": self._judging.tokens_generated if self._judging else 0,
            "host": socket.gethostname(), "pid": os.getpid(), "job": slurm_job() if self._on_slurm else "", "running": len(self._running),
            "waiting_for": waits or ("" if self._running else "prompts of other elements"), "draining": bool(self._leaving)}
        with contextlib.suppress(OSError):
            write_atomic(self.run.evaluation / f"{self._holder.name}.status", json.dumps(status).encode())

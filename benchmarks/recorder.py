"""What the flight recorder costs: the coordinator's CPU time for each message with it, over that without, in one run.

    python -m benchmarks.recorder [--pairs 40] [--slice 1.5] [--workers 16] [--quick]

The real coordinator, with sockets, CURVE and files, in this process; a played fleet in another: rollout workers that give back each lease after a
second, with 8 samples of about 500 tokens, and a trainer that takes batches of 32 groups. The recorder is switched on and off in turn, slice
by slice, so that both have the same load; the ratio is the median over pairs of neighbours, with a bootstrap interval of 95%. `own`: its share
of CPU time, by clocks around what it does.

The last line is one JSON object: name, value (microseconds of CPU a message with it), unit, against (without), ratio, interval, own, ...
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.children import ROOT
from workers.config import ClusterKind, Config
from workers.coordinator.process.main import CoordinatorWorker
from workers.coordinator.recording.inputs import Arrived
from workers.messages.arrays import Bool, Float32, Int32
from workers.messages.from_coordinator import Acknowledged, Batch, Leases, VersionAnnounced
from workers.messages.from_worker import BatchRequest, GroupFinished, Heartbeat, Register, StepFinished
from workers.messages.parts import Announcement, Group, HeldLease, Lease, Purpose, Role, Version
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.transport.client import ClientSockets, find_coordinator
from workers.transport.keys import make_keys, read_keys

EPOCH, SAMPLES, CAPACITY, TOKENS = 1, 8, 64, 500
ANSWER_S, STEP_S, BEAT_S = 1.0, 0.05, 1.0


def make_config() -> Config:
    """What a coordinator of such a run reads."""
    config = Config()
    config.cluster.kind = ClusterKind.slurm  # no launcher, and nobody asks SLURM while all are heard
    config.run.num_steps, config.evaluation.enabled = 1_000_000, False
    config.workflow.group_size, config.trainer.batch_groups, config.trainer.num_minibatches = SAMPLES, 32, 4
    config.staleness.eta, config.rollout.concurrency, config.engine.context_length = 4, 1_000_000, 2048
    return config


# -- the fleet, in a process of its own


def make_answer(draw: np.random.Generator) -> Group:
    """A group, but for its lease."""
    lengths = draw.integers(TOKENS // 2, TOKENS * 3 // 2, SAMPLES)
    total, rewards = int(lengths.sum()), draw.integers(0, 2, SAMPLES)
    return Group(
        group_id="g0", attempt=0, purpose=Purpose.training, prompt_id="p", prompt=Int32.of(np.arange(100)),
        lengths=Int32.of(lengths), tokens=Int32.of(draw.integers(0, 150_000, total)), logprobs=Float32.of(-draw.random(total, np.float32)),
        loss_mask=Bool.of(np.ones(total, bool)), rewards=Float32.of(rewards), scores=Float32.of(rewards),
        epochs=Int32.of([EPOCH]), steps=Int32.of([0]), run_lengths=Int32.of([total]))


class Rollout:
    """Gives back every lease."""

    def __init__(self, sockets: ClientSockets, number: int) -> None:
        self.sockets, self.number = sockets, number
        self.version: Version | None = None
        self.leases: dict[str, Lease] = {}
        self.answers = [make_answer(np.random.default_rng((number, answer))) for answer in range(16)]

    async def published(self) -> None:
        """Hold every version at once."""
        while True:
            message = await self.sockets.receive_published()
            if isinstance(message, VersionAnnounced):
                self.version = message.announcement.version

    async def play(self) -> None:
        """For ever."""
        draw, number = np.random.default_rng(self.number), self.number
        await self.sockets.send(Register(Role.rollout, f"node{number}", 1))
        tasks = [asyncio.create_task(self.beat()), asyncio.create_task(self.published())]
        while True:
            message = await self.sockets.receive()
            if isinstance(message, Leases):
                for lease in message.leases:
                    self.leases[lease.group_id] = lease
                    tasks.append(asyncio.create_task(self.answer(lease, draw)))
            elif isinstance(message, Acknowledged):
                self.leases.pop(message.group_id, None)
            tasks = [task for task in tasks if not task.done()]

    async def answer(self, lease: Lease, draw: np.random.Generator) -> None:
        """After some time."""
        await asyncio.sleep(ANSWER_S * draw.uniform(0.5, 1.5))
        group = self.answers[int(draw.integers(len(self.answers)))]
        await self.sockets.send(GroupFinished(msgspec.structs.replace(
            group, group_id=lease.group_id, attempt=lease.attempt, prompt_id=lease.prompt_id, steps=Int32.of([lease.version.step]))))

    async def beat(self) -> None:
        """A sign of life every second."""
        while True:
            held = [HeldLease(lease.group_id, lease.attempt, lease.purpose, lease.version) for lease in self.leases.values()]
            await self.sockets.send(Heartbeat(self.version, capacity=CAPACITY, leases=held, tokens_in_flight=TOKENS * len(held)))
            await asyncio.sleep(BEAT_S)


class Trainer:
    """Takes batches, and publishes a version for each."""

    def __init__(self, sockets: ClientSockets) -> None:
        self.sockets = sockets

    async def play(self) -> None:
        """For ever."""
        await self.sockets.send(Register(Role.trainer, "node", 1))
        await self.publish(0)
        beating = asyncio.create_task(self.beat())
        while not beating.done():
            message = await self.sockets.receive()
            if isinstance(message, Batch):
                await asyncio.sleep(STEP_S)
                await self.publish(message.step + 1)

    async def publish(self, step: int) -> None:
        """A version, and ask for its batch."""
        await self.sockets.send(StepFinished(Announcement(Version(EPOCH, step), "/weights", "digest"), {"loss": 0.5}))
        await self.sockets.send(BatchRequest(step))

    async def beat(self) -> None:
        """A sign of life every second."""
        while True:
            await self.sockets.send(Heartbeat())
            await asyncio.sleep(BEAT_S)


async def play_fleet(run: RunFolder, num_workers: int) -> None:
    """Until it is killed."""
    address, config = await find_coordinator(run, 60.0), make_config().transport

    def sockets() -> ClientSockets:
        return ClientSockets(config, address, read_keys(run, "server").public, read_keys(run, "client"))

    await asyncio.gather(Trainer(sockets()).play(), *(Rollout(sockets(), number).play() for number in range(num_workers)))


# -- the coordinator, in this process


class Clock:
    """CPU seconds of this process's threads that are spent inside what it is put around, less what looking at the clock takes."""

    def __init__(self) -> None:
        self.seconds = 0.0
        looks = [time.thread_time() for _ in range(2000)]
        self._own = (looks[-1] - looks[0]) / len(looks)

    def around(self, work: Callable) -> Callable:
        """`work`, measured."""
        def measured(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return work(*arguments)
            finally:
                self.seconds += time.thread_time() - began - self._own

        return measured


async def measure(worker: CoordinatorWorker, pairs: int, slice_s: float) -> dict[str, Any]:
    """Switch the recorder on and off in turn, and compare."""
    recorder, machine, clock = worker.recorder, worker.machine, Clock()
    recorder._append = clock.around(recorder._append)  # type: ignore[method-assign]
    note, look = clock.around(recorder.note), clock.around(recorder.look)
    do, arrived = machine.do, itertools.count()
    machine.do = lambda given: (next(arrived) if isinstance(given, Arrived) else 0, do(given))[1]  # type: ignore[method-assign]
    costs: dict[bool, list[float]] = {True: [], False: []}
    own, messages = 0.0, 0
    while worker.core.training.step < 8:
        assert worker.core.ended is None, worker.core.ended
        await asyncio.sleep(0.1)
    for number in range(2 * pairs):
        on = number % 4 in (0, 3)  # on off off on: a drift is nobody's
        machine.note = note if on else None
        recorder.look = look if on else lambda now: None  # type: ignore[method-assign]
        before, cpu, clock.seconds = next(arrived), time.process_time(), 0.0
        await asyncio.sleep(slice_s)
        used, heard = time.process_time() - cpu, next(arrived) - before - 1
        costs[on].append(1e6 * used / max(1, heard))
        if on:
            own, messages = own + clock.seconds / used, messages + heard
    ratios = np.array(costs[True]) / np.array(costs[False])
    draw = np.random.default_rng(0)
    medians = np.median(ratios[draw.integers(0, pairs, (4000, pairs))], axis=1)
    return {"name": "CPU time of the coordinator for a message, recorded over not recorded", "value": round(float(np.median(costs[True])), 1),
            "unit": "us", "against": round(float(np.median(costs[False])), 1), "ratio": round(float(np.median(ratios)), 4),
            "interval": [round(float(edge), 4) for edge in np.percentile(medians, [2.5, 97.5])], "own": round(own / pairs, 4),
            "messages_per_s": round(messages / (pairs * slice_s), 1), "steps": worker.core.training.step}


async def compare(run: RunFolder, pairs: int, slice_s: float, num_workers: int) -> dict[str, Any]:
    """The coordinator and its fleet."""
    worker = CoordinatorWorker(run, EPOCH, None)
    serving = asyncio.create_task(worker.serve())
    fleet = subprocess.Popen([sys.executable, "-m", "benchmarks.recorder", "--fleet", str(run.path), "--workers", str(num_workers)], cwd=ROOT)
    try:
        figures = await measure(worker, pairs, slice_s)
    finally:
        fleet.kill()
        fleet.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    size = sum(path.stat().st_size for path in run.journal.iterdir())
    return figures | {"workers": num_workers, "bytes_per_message": round(size / max(1, figures["messages_per_s"] * pairs * slice_s), 1)}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="slices with it, and as many without")
    parser.add_argument("--slice", type=float, default=1.5, help="seconds of each")
    parser.add_argument("--workers", type=int, default=16, help="rollout workers")
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    parser.add_argument("--fleet", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fleet:
        asyncio.run(play_fleet(RunFolder(options.fleet), options.workers))
        return
    with tempfile.TemporaryDirectory(prefix="headway-benchmark-") as folder:
        run = RunFolder.create(Path(folder) / "run")
        make_keys(run)
        run.config.write_bytes(msgspec.json.encode(make_config()))
        assert incarnations.claim(run, "", "", 0, "node", 1, 0) == EPOCH
        figures = asyncio.run(compare(run, *((4, 0.5, 2) if options.quick else (options.pairs, options.slice, options.workers))))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

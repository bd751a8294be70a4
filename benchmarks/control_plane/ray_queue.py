"""A Ray actor as the queue between rollouts and a trainer: the same groups, at the same rate, as benchmarks.control_plane has of the coordinator.

    python -m benchmarks.control_plane.ray_queue [--rate 30] [--samples 16] [--tokens 8000] [--batch 64] [--seconds 60] [--quick]

    producers (actors of one node) --put(group)--> Queue (async actor of another one) --take(batch)--> trainer (actor, there)

Both nodes of Ray are on this machine, each with a raylet and an object store of its own, so that groups go over TCP, as those of a cluster do.
What a queue of asynchronous RL on Ray does at least: no leases, no staleness, no record, no encryption. Producers send at random times, all of
them together `rate` groups a second, and wait for each answer. Counted is the CPU time of the queue's process and of Ray's own on its node
(raylet, GCS), not of those that produce and train. Needs Ray, in an environment of its own or by `pip install -e '.[benchmark]'`; it says so
where Ray is missing.

The last line is one JSON object: name, value (CPU milliseconds a group), unit, groups_per_s, acknowledged_p50_ms, acknowledged_p99_ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

import numpy as np
import psutil

from benchmarks.control_plane.figures import Load, Seen, figures

QUICK = Load(rate=20.0, samples=2, tokens=20, batch_groups=4)


class Queue:
    """Holds finished groups until there is a batch."""

    def __init__(self) -> None:
        self._groups: asyncio.Queue[dict[str, np.ndarray]] = asyncio.Queue()

    async def put(self, group: dict[str, np.ndarray]) -> bool:
        """A finished group."""
        self._groups.put_nowait(group)
        return True

    async def pid(self) -> int:
        """Of this actor's process."""
        return os.getpid()

    async def take(self, number: int) -> list[dict[str, np.ndarray]]:
        """The next batch, when it is there."""
        return [await self._groups.get() for _ in range(number)]


class Producer:
    """Plays rollout workers."""

    def __init__(self, queue: Any, load: Load, seed: int) -> None:
        self._queue, self._load, self._draw = queue, load, np.random.default_rng(seed)
        total = load.samples * load.tokens
        self._group = {
            "prompt": np.arange(100, dtype=np.int32), "lengths": np.full(load.samples, load.tokens, np.int32),
            "tokens": self._draw.integers(0, 150_000, total).astype(np.int32), "logprobs": -self._draw.random(total, np.float32),
            "loss_mask": np.ones(total, bool), "rewards": np.ones(load.samples, np.float32)}

    async def play(self, rate: float, seconds: float) -> list[float]:
        """Seconds from each group to its answer."""
        end, tasks = time.monotonic() + seconds, []
        while time.monotonic() < end:
            tasks.append(asyncio.ensure_future(self._one()))
            await asyncio.sleep(self._draw.exponential(1 / rate))
        return list(await asyncio.gather(*tasks))

    async def _one(self) -> float:
        began = time.monotonic()
        await self._queue.put.remote(self._group)
        return time.monotonic() - began


class Trainer:
    """Takes one batch after the other."""

    async def play(self, queue: Any, number: int) -> None:
        """Until it is ended."""
        while True:
            await queue.take.remote(number)


def cpu_s(pids: list[int]) -> float:
    """CPU seconds so far of processes."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def measure(ray: Any, load: Load, seconds: float, own: list[int]) -> dict[str, Any]:
    """Both sides, for so long; `own`: Ray's processes on the queue's node."""
    queue = ray.remote(Queue).options(max_concurrency=1000, resources={"trains": 1}).remote()
    producers = [ray.remote(Producer).options(max_concurrency=1000, resources={"generates": 1}).remote(queue, load, seed) for seed in range(2)]
    trainer = ray.remote(Trainer).options(resources={"trains": 1}).remote()
    ray.get([producer.play.remote(load.rate / 2, min(2.0, seconds)) for producer in producers])  # started, and warm
    trainer.play.remote(queue, load.batch_groups)
    counted = [*own, ray.get(queue.pid.remote())]
    before = cpu_s(counted)
    times = [each for found in ray.get([producer.play.remote(load.rate / 2, seconds) for producer in producers]) for each in found]
    spent = cpu_s(counted) - before
    found = figures(Seen(acknowledged_s=times), seconds)
    return {name: value for name, value in found.items() if "acknowledged" in name or name in ("groups", "groups_per_s")} | {
        "cpu_ms_per_group": round(1000 * spent / max(1, len(times)), 2)}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control_plane.ray_queue", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=30.0, help="groups a second")
    parser.add_argument("--samples", type=int, default=16, help="of a group")
    parser.add_argument("--tokens", type=int, default=8000, help="of a sample")
    parser.add_argument("--batch", type=int, default=64, help="groups of a training step")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    options = parser.parse_args()
    try:
        import ray
        from ray.cluster_utils import Cluster
    except ImportError:
        print("Ray is not installed here: nothing to compare with (pip install -e '.[benchmark]')", file=sys.stderr)
        print(json.dumps({"name": "ray_queue", "skipped": "no Ray"}))
        return
    load = QUICK if options.quick else Load(rate=options.rate, samples=options.samples, tokens=options.tokens, batch_groups=options.batch)
    seconds = 3.0 if options.quick else options.seconds
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "resources": {"trains": 2}, "include_dashboard": False})
    cluster.add_node(num_cpus=2, resources={"generates": 2})
    ray.init(address=cluster.address, logging_level="ERROR", configure_logging=False)
    own = [each.process.pid for name in ("raylet", "gcs_server") for each in cluster.head_node.all_processes[name]]
    found = measure(ray, load, seconds, own)
    ray.shutdown()
    cluster.shutdown()
    name = f"a Ray actor as the queue, {load.samples} x {load.tokens} tokens"
    print(json.dumps({"name": name, "value": found["cpu_ms_per_group"], "unit": "ms"} | found))


if __name__ == "__main__":
    main()

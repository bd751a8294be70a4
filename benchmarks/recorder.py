"""What the flight recorder costs: the coordinator's CPU time for each message with it, over that without, in one run.

    python -m benchmarks.recorder [--pairs 40] [--slice 1.5] [--workers 16] [--quick]

The real coordinator, with sockets, CURVE and files, in this process; a played fleet in another (control_plane/fleet.py): rollout workers that give
back each lease after a second, with 8 samples of 500 tokens, and a trainer that takes batches of 32 groups. The recorder is switched on and off in
turn, slice by slice, so that both have the same load; the ratio is the median over pairs of neighbours, with a bootstrap interval of 95%. `own`:
its share of CPU time, by clocks around what it does.

The last line is one JSON object: name, value (microseconds of CPU a message with it), unit, against (without), ratio, interval, own, ...
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.children import ROOT
from benchmarks.control_plane.both_sides import fleet_command, make_run
from benchmarks.control_plane.figures import EPOCH, Load
from workers.coordinator.process.main import CoordinatorWorker
from workers.coordinator.recording.inputs import Arrived
from workers.run.folder import RunFolder

FOREVER_S = 1e6
LOAD = Load(workers=16, leases_each=8, rate=128.0, samples=8, tokens=500, batch_groups=32)


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


async def compare(run: RunFolder, pairs: int, slice_s: float, load: Load) -> dict[str, Any]:
    """The coordinator and its fleet."""
    worker = CoordinatorWorker(run, EPOCH, None)
    serving = asyncio.create_task(worker.serve())
    fleet = subprocess.Popen(fleet_command(run, load, FOREVER_S), cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        figures = await measure(worker, pairs, slice_s)
    finally:
        fleet.kill()
        fleet.wait()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
    size = sum(path.stat().st_size for path in run.journal.iterdir())
    return figures | {"workers": load.workers, "bytes_per_message": round(size / max(1, figures["messages_per_s"] * pairs * slice_s), 1)}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorder", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="slices with it, and as many without")
    parser.add_argument("--slice", type=float, default=1.5, help="seconds of each")
    parser.add_argument("--workers", type=int, default=16, help="rollout workers")
    parser.add_argument("--quick", action="store_true", help="the smallest form: shows that it works")
    options = parser.parse_args()
    load = replace(LOAD, workers=2 if options.quick else options.workers)
    with tempfile.TemporaryDirectory(prefix="headway-benchmark-") as folder:
        run = make_run(Path(folder), load)
        figures = asyncio.run(compare(run, 4 if options.quick else options.pairs, 0.5 if options.quick else options.slice, load))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""A run of thousands of steps with the synthetic engine: new weights at each, evaluations, checkpoints, exports; and what each process holds.

    live run --every two seconds--> memory, descriptors, threads of each process; files in the run folder and /dev/shm
             metrics.jsonl --> seconds a step             all of them --> growth.py --> flat, or a fault
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil

from tests.e2e.runs import LiveRun, live_run
from tests.soak.growth import Growth, growth
from workers.run.files import read_lines

OVERRIDES = (
    "engine.server=synthetic", "run.target_accuracy=null", "run.max_hours=24", "workflow.group_size=2", "trainer.batch_groups=2",
    "trainer.num_minibatches=1", "evaluation.every_steps=50", "checkpoint.every_steps=100")
PROCESSES = ("launcher", "inference task", "engine", "reward", "train task", "coordinator")
LOOK_S = 2.0
LIMITS = {"memory": (0.05, 10.0), "descriptors": (0.0, 2.0), "threads": (0.0, 1.0), "files": (0.05, 5.0), "seconds": (0.05, 0.0)}
"""By the last word of a series: the share, and the amount, that is no growth: MB, numbers, seconds a step."""


@dataclass
class Findings:
    """What a soak has found: of each series how it went, and what has grown."""

    num_steps: int = 0
    minutes: float = 0.0
    series: dict[str, Growth] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        rows = [f"{name:<28}{found.first:10.4g}{found.last:10.4g}{found.rise:+10.3g}  ({found.low:+.3g} to {found.high:+.3g})"
                for name, found in self.series.items()]
        head = f"{'':<28}{'2nd tenth':>10}{'last':>10}{'rise':>10}  (99 %)"
        return "\n".join([f"{self.num_steps} steps in {self.minutes:.0f} minutes", head, *rows,
                          "nothing grows" if not self.faults else "GROWS: " + "; ".join(self.faults)])


class Meter:
    """What is measured, by its name, with the times."""

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._processes = {name: run.process(name) for name in PROCESSES}
        self._shared = Path(run.run.weights("/dev/shm")).parent
        self.times: list[float] = []
        self.values: dict[str, list[float]] = defaultdict(list)

    def look(self, now: float) -> None:
        """Measure. Raises psutil.NoSuchProcess where one has ended."""
        found = {}
        for name, process in self._processes.items():
            with process.oneshot():
                found |= {f"{name} memory": process.memory_info().rss / 2**20, f"{name} descriptors": process.num_fds(),
                          f"{name} threads": process.num_threads()}
        found["run folder files"] = sum(len(files) for _, _, files in os.walk(self._run.run.path))
        found["shared memory files"] = sum(len(files) for _, _, files in os.walk(self._shared))
        self.times.append(now)
        for name, value in found.items():
            self.values[name].append(float(value))


def campaign(path: Path, num_steps: int) -> Findings:
    """Run `num_steps` steps in `path`, and judge them."""
    began = time.monotonic()
    with live_run(path, *OVERRIDES, f"run.num_steps={num_steps}") as run:
        run.after_steps(5)
        meter = Meter(run)
        while run.launcher.poll() is None:
            try:
                meter.look(time.monotonic() - began)
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is about to
                break
            time.sleep(LOOK_S)
        status = run.launcher.wait(300)
        run.assert_nothing_left()
        steps = read_lines(run.run.metrics)
    findings = Findings(len(steps), (time.monotonic() - began) / 60)
    if status:
        findings.faults.append(f"the run ended with status {status}: {run.run.ended()}")
    findings.series = {name: growth(meter.times, values) for name, values in sorted(meter.values.items())}
    ends = [record["seconds"] for record in steps]
    findings.series["a step's seconds"] = growth(ends[1:], [after - before for before, after in pairwise(ends)])
    findings.faults += [f"{name} by {found.rise:.3g}" for name, found in findings.series.items() if found.beyond(*LIMITS[name.split()[-1]])]
    return findings

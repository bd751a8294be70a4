"""A run without models, its coordinator as a process, and how the played fleet is started."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.children import ROOT
from benchmarks.control_plane.figures import EPOCH, Load
from workers.config import ClusterKind, Config
from workers.run import incarnations
from workers.run.folder import RunFolder
from workers.transport.keys import make_keys
from workers.transport.rendezvous import newest

LIMIT_S = 120.0


def make_run(folder: Path, load: Load) -> RunFolder:
    """A run folder with keys and a config in which nothing holds leases back."""
    config = Config()
    config.cluster.kind = ClusterKind.slurm  # no launcher, and nobody asks SLURM while all are heard
    config.run.num_steps, config.evaluation.enabled = 1_000_000, False
    config.workflow.group_size, config.workflow.max_new_tokens = load.samples, load.tokens
    config.trainer.batch_groups, config.trainer.num_minibatches = load.batch_groups, 1
    config.rollout.concurrency, config.engine.context_length = load.workers * load.leases_each, load.tokens + 1000
    config.staleness.eta = math.ceil(load.workers * load.leases_each / load.batch_groups) + 2
    run = RunFolder.create(folder / "run")
    make_keys(run)
    run.config.write_bytes(msgspec.json.encode(config))
    assert incarnations.claim(run, "", "", 0, "node", 1, 0) == EPOCH
    return run


def start_coordinator(run: RunFolder) -> subprocess.Popen:
    """As the trainer starts it; it ends with this process. Returns when it can be reached."""
    started = subprocess.Popen([sys.executable, "-m", "workers.coordinator.process.main", str(run.path), str(os.getpid()), str(EPOCH)], cwd=ROOT,
                               stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + LIMIT_S
    while newest(run) is None:
        if time.monotonic() > deadline:
            started.kill()
            raise TimeoutError("no coordinator has appeared")
        time.sleep(0.05)
    return started


def fleet_command(run: RunFolder, load: Load, seconds: float) -> list[str]:
    """Plays the fleet for so long, and prints what it has seen."""
    return [sys.executable, "-m", "benchmarks.control_plane.fleet", str(run.path), msgspec.json.encode(load).decode(), str(seconds)]

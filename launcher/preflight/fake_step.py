"""`headway --dry-run --fake-step`: what a training step does to a GPU, counted without one.

    config, config.json --a short process (workers/trainer/fake_device)--> the trainer's own step, on tensors that have shapes only
        --> bytes, operators, waits of the host, exchanges of the first rank of the first and of the last pipeline stage

It takes seconds, and as much memory as Python, torch and Megatron-core (docs/gpu.md says what it cannot show).
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from launcher.config.schema import FullConfig
from launcher.jobs.sbatch_script import ROOT
from launcher.memory.estimate import bytes_in_words
from workers.config import Config, ConfigError, require

DEADLINE_S = 600.0
WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
NAMES = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "allgather_": "all-gather", "allgather_into_tensor_coalesced_": "all-gather",
         "_reduce_scatter_base_": "reduce-scatter", "reduce_scatter_tensor_coalesced_": "reduce-scatter", "alltoall_base_": "all-to-all",
         "broadcast_": "broadcast"}


def ask(config: FullConfig, folder: Path, model: Path) -> list[str]:
    """Lines to tell. `folder`: for a file of this one's own. Raises `ConfigError` on what cannot work."""
    require(not config.evaluates, "launch.fake_step", True, "is of training, and an evaluation has none", "Leave --fake-step out")
    plan = config.plan()
    ranks = sorted({0, plan.num_train_devices - 1} if config.trainer.parallel.pp > 1 else {0})
    return [line for figures in measure(config.for_workers(), folder, model, plan.num_train_devices, ranks) for line in in_lines(figures)]


def measure(config: Config, folder: Path, model: Path, world_size: int, ranks: Sequence[int]) -> list[dict]:
    """The figures of each of `ranks` (fake_device/step.py), in a process of their own. `folder`: for a file. Raises `ConfigError`."""
    written = folder / "fake_step.json"
    written.write_bytes(msgspec.json.encode(config))
    command = [sys.executable, "-m", "workers.trainer.fake_device", str(written), str(model), str(world_size), *map(str, ranks)]
    try:
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S,
                              check=False,
                              env={**os.environ, **WITHOUT_GPU})
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"--fake-step: has not ended in {DEADLINE_S:g} s. Give it fewer layers (num_hidden_layers of a copy of the model's "
                          "config.json): each costs the same") from error
    if done.returncode:
        said = done.stderr.strip() or f"it ended with status {done.returncode} and said nothing: this machine may be out of memory"
        raise ConfigError(f"--fake-step: {said.splitlines()[-1] if done.returncode == 2 else said}")
    return [msgspec.json.decode(line) for line in done.stdout.splitlines()]


def in_lines(figures: dict) -> Sequence[str]:
    """One rank's figures for people. Pure."""
    passes, step, number = figures["passes"], figures["step"], max(1, figures["num_microbatches"])
    waits = sum(step["waits"].values()) / figures["num_minibatches"]
    where = ", ".join(f"{count} at {place}" for place, count in sorted(step["waits"].items(), key=lambda item: -item[1])[:3])
    return [
        f"fake step of rank {figures['rank']}, on a GPU: at most {bytes_in_words(figures['peak'])} ({bytes_in_words(figures['held'])} between steps)",
        f"  a micro-batch of {figures['tokens']} tokens: {passes['operators'] // number} operators; a minibatch of {number}: {waits:g} waits of the "
        f"host for its device (a step: {where or 'none'})",
        f"  a minibatch's passes exchange {_exchanged(passes) or 'nothing'}; a step in all {_exchanged(step) or 'nothing'}"]


def _exchanged(counts: dict) -> str:
    """'reduce-scatter 18.2 GiB among 2, all-gather 27.2 GiB among 2': the kinds that take a MiB or more."""
    by_kind: dict[str, float] = {}
    for key, size in counts["exchanged"].items():
        kind, _, ranks = key.partition(" x")
        name = f"{NAMES.get(kind, kind)} among {ranks}" if ranks != "1" else ""
        by_kind[name] = by_kind.get(name, 0.0) + size
    return ", ".join(f"{name} {bytes_in_words(size)}" for name, size in sorted(by_kind.items(), key=lambda item: -item[1]) if name and size >= 2**20)

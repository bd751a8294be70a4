"""`trainer.device`, `engine.dtype` and `trainer.dtype` = auto, settled before a run starts; and what this machine cannot run, refused.

    devices         GPUs where jobs ask for them (cluster.*.gpus), or this machine has some. From then on every process refuses to do without
    this machine    bfloat16 where its kernels run it faster than float32, else float32: asked of a short process, which tries it (model/dtypes.py)
    SLURM           bfloat16 for jobs with GPUs; float32 for jobs without, whose nodes' CPUs are not known here
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from launcher.config.schema import FullConfig
from launcher.jobs.sbatch_script import ROOT
from workers.config import ClusterKind, ConfigError, Device, Dtype, Server, require
from workers.run.processes import distinct

DEADLINE_S = 300.0
DRIVERS = (Path("/proc/driver/nvidia"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Of NVIDIA's, AMD's, and any on Windows' Linux: what is there where torch may find a GPU."""
Found = dict[str, dict]
"""By device (cpu, cuda): `name`, the dtypes that it `runs`, the `best` of them, the `gflops` it reaches; as workers/model/dtypes.py prints it."""


class Settled(NamedTuple):
    """`told`: a line for the plan; `cpu_gflops`: what a thread of this machine's CPU reaches in the trainer's dtype, 0 where that was not tried."""

    told: str
    cpu_gflops: float


def ask() -> Found:
    """What this machine computes in. Raises `ConfigError` where torch cannot be asked."""
    command, visible = [sys.executable, "-m", "workers.model.dtypes"], os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        asked = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=DEADLINE_S,
                               check=False,
                               env=os.environ | ({"CUDA_VISIBLE_DEVICES": distinct(visible)} if visible else {}))
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"`{' '.join(command)}` has not ended in {DEADLINE_S:g} s: torch does not start on this machine. Try it by hand") from error
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["nothing was said"])[-1]
        raise ConfigError(f"torch cannot be used on this machine ({last}). Install it in the environment of this command")
    return json.loads(asked.stdout.splitlines()[-1])


def settle(config: FullConfig, ask: Callable[[], Found] = ask) -> Settled:
    """Put devices and dtypes in the place of `auto`. Raises `ConfigError` for what this machine cannot run."""
    parts = [name for name, used in (("engine", not config.supervised), ("trainer", not config.evaluates)) if used]
    on_slurm, plain = config.cluster.kind is ClusterKind.slurm, all(getattr(config, name).dtype is Dtype.float32 for name in parts)
    found = {} if on_slurm or (plain and not has_gpus()) else ask()
    _settle_devices(config, found)
    told = {name: _settled(config, name, found) for name in parts}
    for name in {"engine", "trainer"} - set(parts):  # no one computes there
        if getattr(config, name).dtype is Dtype.auto:
            getattr(config, name).dtype = Dtype.float32
    cpu = found.get("cpu", {})
    gflops = cpu.get("gflops", 0.0) if cpu.get("best") == config.trainer.dtype.value else 0.0
    alike = len(set(told.values())) == 1
    text = f"{' and '.join(told)} {told[parts[0]]}" if alike else ", ".join(f"{name} {text}" for name, text in told.items())
    return Settled(f"dtype: {text}", gflops)


def has_gpus() -> bool:
    """Whether this machine may have GPUs: there is a driver, and they are not hidden."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(path.exists() for path in DRIVERS)


def _settle_devices(config: FullConfig, found: Found) -> None:
    if config.cluster.kind is ClusterKind.local:
        there = "cuda" in found
        require(there or config.trainer.device is not Device.cuda or config.evaluates, "trainer.device", "cuda", "this machine's torch sees no GPU",
                "Install torch for GPUs (constraints/gpu.txt), look at nvidia-smi, or use trainer.device=cpu")
    else:
        there = config.gives_gpus("train")
        require(there or config.trainer.device is not Device.cuda, "trainer.device", "cuda", "its jobs ask for no GPUs",
                "Set cluster.train.gpus=gres, or trainer.device=auto")
        if config.gives_gpus("inference") and config.engine.server is Server.sglang and not config.engine.device:
            config.engine.device = "cuda"  # SGLang would look what there is, and serve from CPUs
    if config.trainer.device is Device.auto:
        config.trainer.device = Device.cuda if there else Device.cpu


def _settled(config: FullConfig, name: str, found: Found) -> str:
    """Settle one part; returns its dtype, with the reason where it was chosen here."""
    part = getattr(config, name)
    chosen, why = part.dtype is not Dtype.auto, ""
    if config.cluster.kind is ClusterKind.slurm:
        if not chosen:
            gpus = config.gives_gpus("inference") if name == "engine" else config.trainer.device is Device.cuda
            part.dtype = Dtype.bfloat16 if gpus else Dtype.float32
            why = "its jobs ask for GPUs" if gpus else "its jobs ask for no GPUs, and their nodes' CPUs are not known here"
    elif found:
        on_gpu = {"trainer": config.trainer.device is Device.cuda, "engine": config.engine.server is Server.sglang and config.engine.device != "cpu"}
        uses_gpu = "cuda" in found and on_gpu[name]
        device = found["cuda" if uses_gpu else "cpu"]
        require(not chosen or part.dtype.value in device["runs"], f"{name}.dtype", part.dtype.value,
                f"the kernels of this machine's {device['name']} do not run it; they run {' and '.join(device['runs'])}",
                f"Use {name}.dtype={device['best']}, or auto, which chooses it")
        if not chosen:
            part.dtype = Dtype(device["best"])
            why = f"the best that this machine's {device['name']} runs"
    return part.dtype.value + (f" (auto: {why})" if why else "")

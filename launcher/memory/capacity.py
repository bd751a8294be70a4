"""How much memory the parts of a run get, as far as it is known before anything is submitted.

    on SLURM    cluster.train.gpu_memory_gb, or what the GPUs' type decides; cluster.*.mem and mem_per_gpu
    here        nvidia-smi, and the machine's memory and swap space, of which a container may have a part
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from launcher.config.cluster import RoleConfig
from launcher.config.gpu_types import gib_of_type
from launcher.config.schema import FullConfig
from launcher.jobs.job_specs import num_train_nodes
from launcher.slurm import queries
from workers.config import ClusterKind, Device, Server, require
from workers.slurm.command import SlurmError

GIB = 2**30
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
ASK_S = 10.0


@dataclass(frozen=True)
class Capacity:
    """Memory that there is: `what` has `size` bytes, as `key` says."""

    size: float
    what: str
    key: str


@dataclass(frozen=True)
class Capacities:
    """The memory that is known: of a training GPU, of the job on a training node, of an inference replica's job, of this machine, of a GPU
    for inference.

    `on_gpus`: whether training runs on GPUs.
    """

    on_gpus: bool
    gpu: Capacity | None = None
    node: Capacity | None = None
    replica: Capacity | None = None
    machine: Capacity | None = None
    inference_gpu: Capacity | None = None


def look(config: FullConfig) -> Capacities:
    """What is known. Asks SLURM for the type of its GPUs where the config does not say it; where it does not answer, that stays unknown.

    Raises `ConfigError` where this machine has fewer GPUs than training takes.
    """
    return _on_slurm(config) if config.cluster.kind is ClusterKind.slurm else _here(config)


def types_in(resources: Iterable[str]) -> set[str]:
    """The types of GPUs in SLURM's words for the resources of nodes, 'gpu:h100:8(S:0-1)'; '' for GPUs without a type."""
    found = {match for text in resources for match in re.findall(r"gpu:([^,(]+)", text)}
    return {"" if name.isdigit() else name.partition(":")[0] for name in found}


def bytes_of(text: str) -> float:
    """Memory as sbatch reads it, '64G'; 0 where none is given, or all of the node ('0')."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return int(match[1]) * 1024.0 ** ("KMGT".index(match[2] or "M") + 1) if match else 0.0


def _gpu(part: RoleConfig, key: str, types: set[str]) -> Capacity | None:
    """`types`: those of which a job may get any."""
    if part.gpu_memory_gb:
        return Capacity(part.gpu_memory_gb * GIB, "a GPU", f"{key}.gpu_memory_gb={part.gpu_memory_gb:g}")
    sizes = {gib_of_type(name) for name in types}
    if not sizes or 0.0 in sizes:
        return None
    return Capacity(min(sizes) * GIB, f"a GPU of type {' or '.join(sorted(types))}", f"{key}.gpu_memory_gb says otherwise")


def _on_slurm(config: FullConfig) -> Capacities:
    train, inference, plan = config.cluster.train, config.cluster.inference, config.plan()
    on_gpus = config.gives_gpus("train") and config.trainer.device is not Device.cpu
    per_node = plan.num_train_devices / num_train_nodes(plan, config.devices_per_node("train"))
    on_sglang = config.engine.server is Server.sglang and config.gives_gpus("inference")
    return Capacities(on_gpus, _gpu(train, "cluster.train", _types(train)) if on_gpus else None, _job(train, "cluster.train", per_node),
                 _job(inference, "cluster.inference", plan.replica_size / config.replica_nodes),
                 inference_gpu=_gpu(inference, "cluster.inference", _types(inference)) if on_sglang else None)


def _types(part: RoleConfig) -> set[str]:
    if part.gpu_type or part.gpu_memory_gb or not part.partition:
        return {part.gpu_type}
    try:
        return types_in(kind.gres for kind in queries.node_kinds(part.partition, patience_s=0) if kind.num_gpus)
    except SlurmError:
        return set()


def _job(part: RoleConfig, key: str, num_gpus: float) -> Capacity | None:
    if size := bytes_of(part.mem):
        return Capacity(size, "a job on its node", f"{key}.mem={part.mem}")
    size = bytes_of(part.mem_per_gpu) * num_gpus
    return Capacity(size, "a job on its node", f"{key}.mem_per_gpu={part.mem_per_gpu}") if size else None


def _here(config: FullConfig) -> Capacities:
    sizes, number, total = [] if config.trainer.device is Device.cpu else _gpus_here(), config.plan().num_train_devices, config.allocation.num_devices
    on_sglang = bool(sizes) and config.engine.server is Server.sglang and config.engine.device != "cpu"
    remedy = "Use fewer, or set CUDA_VISIBLE_DEVICES= to train on CPUs"
    require(not 0 < len(sizes) < number, "allocation.num_devices", total,
            f"leaves training {number} devices, and there are {len(sizes)} GPUs here (CUDA_VISIBLE_DEVICES)", remedy)
    require(not on_sglang or len(sizes) >= total, "allocation.num_devices", total,
            f"must be at most the {len(sizes)} GPUs here (CUDA_VISIBLE_DEVICES), which training and SGLang share out", remedy)
    gpu = _gpu(config.cluster.train, "cluster.train", set())
    if sizes and gpu is None and min(sizes) < math.inf:
        gpu = Capacity(min(sizes), "the smallest GPU here", "nvidia-smi")
    return Capacities(bool(sizes), gpu if sizes else None, machine=Capacity(memory_here(), "this machine", "its memory and swap space"),
                 inference_gpu=gpu if on_sglang else None)


def memory_here() -> float:
    """Bytes of memory that processes on this machine may have, swap space included."""
    limit = float("inf")
    with contextlib.suppress(OSError, ValueError):  # no cgroups, or 'max'
        limit = int(CGROUP_LIMIT.read_text())
    return min(limit, psutil.virtual_memory().total + psutil.swap_memory().total)


def _gpus_here() -> list[float]:
    """Bytes of each GPU that torch would find on this machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                              timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return visible_sizes({row[0]: int(row[1]) * 2.0**20 if row[1].isdigit() else math.inf for row in rows if len(row) == 2}, visible)


def visible_sizes(sizes: Mapping[str, float], visible: str | None) -> list[float]:
    """The `sizes` of GPUs (infinite: not known), by UUID in the order of their numbers, that CUDA_VISIBLE_DEVICES shows: numbers, or beginnings of
    UUIDs, up to the first that names none. Of a part of one (MIG-...) only its GPUs' smallest is known."""
    if visible is None or not sizes:
        return list(sizes.values())
    found: list[float] = []
    for name in visible.split(","):
        whole = name.strip()
        named = [size for number, (uuid, size) in enumerate(sizes.items()) if whole and (whole == str(number) or uuid.startswith(whole))]
        if not named and not whole.startswith("MIG-"):
            break
        found.append(min(named or sizes.values()))
    return found

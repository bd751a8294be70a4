"""The GPUs of a node as one process sees them: are they there, and what is set for them before anything uses them.

    launcher: the jobs ask for GPUs --trainer.device=cuda--> every rank, and the preflight's probe --gpus_seen.py, problem--> refused, or bound to the
    CPUs next to its GPU

Without this a torch that finds no CUDA would train on the node's CPUs, and say nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from workers.config import Config, ConfigError, Device, Dtype, Transport
from workers.run import gpus_seen

SYSFS = Path("/sys/bus/pci/devices")
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""By CUDA's major version; minor ones are compatible (CUDA Compatibility, "Minor Version Compatibility")."""
PYTHONS_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
MOST_RANKS = 8
"""Of a node, which share its CPUs."""
HALF = (8, 0)
"""Compute capability from which GPUs compute in bfloat16."""
INSTALL = "Install one for GPUs there (pip install -c constraints/gpu.txt -e '.[gpu]'), or set cluster.python or cluster.container"


class Gpu(msgspec.Struct, frozen=True):
    """One of them: `capability` is CUDA's, `pci` its place on the bus, '0000:3b:00.0'."""

    name: str
    capability: tuple[int, int]
    pci: str


class Found(msgspec.Struct, frozen=True):
    """What there is: versions of torch, of the CUDA it is built for ('': none), of its NCCL, and of the node's driver ('': none)."""

    torch: str
    cuda: str
    nccl: str
    driver: str
    gpus: list[Gpu] = []
    error: str = ""


def found(seen: object) -> Found:
    """What gpus_seen.py says, in whichever interpreter. Raises `msgspec.ValidationError` on anything else."""
    return msgspec.convert(seen, Found)


def problem(found: Found, half: bool, visible: str | None, role: str = "train") -> str:
    """Why the job of a role can use no GPU, with the remedy; '' where it can. `half`: in bfloat16; `visible`: CUDA_VISIBLE_DEVICES. Pure."""
    if found.gpus:
        weak = [gpu for gpu in found.gpus if half and gpu.capability < HALF]
        key = "trainer.dtype=float32" if role == "train" else "engine.dtype=float16"
        return f"{weak[0].name} does not compute in bfloat16. Use {key}, or newer GPUs" if weak else ""
    if not found.cuda:
        return f"torch {found.torch} is built for CPUs. {INSTALL}"
    major = int(found.cuda.partition(".")[0])
    oldest = OLDEST_DRIVER.get(major, max(OLDEST_DRIVER.values()))
    if not found.driver:
        return "the node has no NVIDIA driver, so no GPU that this job could have been given. Name a partition of GPUs, or exclude the node"
    if int(found.driver.partition(".")[0]) < oldest:
        return (f"torch {found.torch} is built for CUDA {found.cuda}, which needs driver {oldest} or newer, and the node has {found.driver}. "
                "Use a torch for an older CUDA, or nodes with a newer driver")
    if found.error:
        return f"the node has driver {found.driver}, and CUDA does not start: {found.error}. Look at the node with nvidia-smi, or exclude it"
    seen = f"CUDA_VISIBLE_DEVICES={visible!r} shows none of them" if visible is not None else "torch sees none of its GPUs"
    return f"the node has driver {found.driver}, and {seen}. Ask for GPUs (cluster.{role}.gpus), or look at the node with nvidia-smi"


def require_gpu(config: Config) -> None:
    """Refuse to train on CPUs where a run's jobs have GPUs. Raises `ConfigError`."""
    if config.trainer.device is not Device.cuda:
        return
    if words := problem(found(gpus_seen.look()), config.trainer.dtype is Dtype.bfloat16, os.environ.get("CUDA_VISIBLE_DEVICES")):
        raise ConfigError(f"trainer.device=cuda: {words}. trainer.device=cpu trains on CPUs")


def environment_of(python: str) -> dict[str, str]:
    """The environment for another interpreter ('': this one): without what is of this one's alone."""
    return {name: value for name, value in os.environ.items() if not python or name not in PYTHONS_OWN}


def set_environment(config: Config) -> None:
    """What CUDA's libraries read once, before torch is imported; what a user or a site has set stays."""
    if config.trainer.device is Device.cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    defaults = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # kernels start in the order of their calls: exchanges before what they overlap (Megatron-core)
    }
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # micro-batches have all sizes: fewer fragments
    if config.weights.transport is Transport.nccl:
        defaults["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang's own processes have it: both sides of a group must agree
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def cpus_of(pci: str, sysfs: Path = SYSFS) -> set[int]:
    """The CPUs nearest to a device, by its place on the bus; none where that is not known."""
    try:
        ranges = (sysfs / pci / "local_cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    bounds = [part.partition("-") for part in ranges if part]
    return {cpu for low, _, high in bounds for cpu in range(int(low), int(high or low) + 1)}


def bind(number: int) -> str:
    """Keep this process on the CPUs next to GPU `number`, of those that it may use at all; its memory comes from there too. Returns what was
    done, for the log; '' where there is no choice."""
    allowed = os.sched_getaffinity(0)
    near = cpus_of(gpus_seen.look()["gpus"][number]["pci"]) & allowed
    if near == allowed or len(near) * MOST_RANKS < len(allowed) or len(near) < 2:
        return ""  # too few for a rank with its threads
    os.sched_setaffinity(0, near)
    return f"bound to the {len(near)} of {len(allowed)} CPUs that are next to its GPU"

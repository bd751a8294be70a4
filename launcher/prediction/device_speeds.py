"""How fast devices are, by the names of their types in SLURM. Makers' data sheets: dense bfloat16, memory bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceSpeed:
    """`flops`: operations a second; `bandwidth`: bytes a second of its memory; `said`: what this was taken from; `is_gpu`, or a core of a CPU."""

    flops: float
    bandwidth: float
    said: str
    is_gpu: bool = True


GPUS = {"t4": (65, 320), "v100": (125, 900), "a10": (125, 600), "a30": (165, 933), "a40": (150, 696), "a6000": (155, 768), "l4": (121, 300),
        "l40": (181, 864), "l40s": (362, 864), "a100": (312, 2039), "a800": (312, 2039), "h100": (989, 3350), "h800": (989, 3350),
        "h200": (989, 4800), "b200": (2250, 8000), "mi210": (181, 1638), "mi250x": (192, 1638), "mi300x": (1307, 5300)}
"""TFLOPS and GB/s by type; of an MI250X half, as programs see it."""
USUAL = "h100"
CPU_GFLOPS, CPU_GBS = 100.0, 10.0
"""Of a core: a usual one's, where nothing was tried."""


def device(on_gpus: bool, gpu_type: str, cpu_gflops: float = CPU_GFLOPS) -> DeviceSpeed:
    """What a role's devices are; GPUs of an unknown type are taken for `USUAL` ones."""
    if not on_gpus:
        return DeviceSpeed(cpu_gflops * 1e9, CPU_GBS * 1e9, "a core of a CPU", is_gpu=False)
    words = re.split(r"[^a-z0-9]+", gpu_type.lower())
    known = next((word for word in words if word in GPUS), "")
    tflops, gbs = GPUS[known or USUAL]
    return DeviceSpeed(tflops * 1e12, gbs * 1e9, known or f"{USUAL} (the type is not known: cluster.ROLE.gpu_type names it)")

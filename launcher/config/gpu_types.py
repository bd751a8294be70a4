"""What is known of GPUs by the names of their types in SLURM, and what follows from it for a config that does not say it."""

from __future__ import annotations

import re

GPU_GIB = {"h100": 79, "h800": 79, "h200": 140, "b200": 179, "a30": 24, "a40": 44, "a6000": 47, "l4": 22, "l40": 44, "l40s": 44, "a10": 22, "t4": 15,
           "mi210": 64, "mi250x": 64, "mi300x": 192}
"""What programs can have of a GPU, by its type's name in SLURM's gres, where that decides it: an A100 has 40 or 80 GB, a V100 16 or 32."""
TOKENS = ((70, 16384), (40, 8192), (0, 4096))
"""GiB of a training GPU, and tokens of a micro-batch that suit it: more make no matrix faster, and take memory for activations."""
TOKENS_UNKNOWN, TOKENS_ON_CPUS = 8192, 2048


def gib_of_type(name: str) -> float:
    """GiB of a GPU by SLURM's name for its type, such as h100 or nvidia_a100-sxm4-80gb; 0: the name does not tell."""
    sizes = re.findall(r"(\d+)gb", name.lower())
    words = re.split(r"[^a-z0-9]+", name.lower())
    if "gh200" in words:
        return 0.0  # 480gb in its name is the memory of its CPU
    if sizes:
        return float(sizes[-1])  # the last: nvidia_a100_80gb_1g.10gb is a tenth of one
    return float(next((GPU_GIB[word] for word in words if word in GPU_GIB), 0)) if "nvl" not in words else 0.0


def microbatch_tokens(on_gpus: bool, gpu_gib: float) -> int:
    """Tokens of a micro-batch for training on GPUs of so many GiB (0: not known), or on CPUs."""
    if not on_gpus:
        return TOKENS_ON_CPUS
    return next(tokens for gib, tokens in TOKENS if gpu_gib >= gib) if gpu_gib else TOKENS_UNKNOWN

"""The checks, in the order in which they run: what each shows, on how many GPUs, what it is held against, and how long it may take.

A check is a command that ends with a line of JSON: `value`, `passed`, `told` (docs/gpu.md). References are of the sources that stand beside them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

PYTHON = sys.executable
SMALL = "--small"
UTILISATION = ">= 0.35 (prime-rl: 0.36, 4B)"


@dataclass(frozen=True)
class Check:
    """`arguments`: of Python, from the repository's root; with `small` it runs on CPUs, in small, and is held against nothing."""

    name: str
    what: str
    reference: str
    num_gpus: int
    limit_s: int
    arguments: tuple[str, ...]
    small: bool = False
    needs_sglang: bool = False


def check(name: str, what: str, reference: str, limit_s: int, *arguments: str, num_gpus: int = 1, small: bool = True, sglang: bool = False) -> Check:
    """One of this package's programs."""
    module, *rest = arguments
    return Check(name, what, reference, num_gpus, limit_s, ("-m", f"benchmarks.acceptance.{module}", *rest), small, sglang)


ONE = (
    check("versions", "one torch and one NCCL, a driver that suits them", "the same version on both sides", 180, "versions"),
    check("cuda tests", "attention packed and with shared prompts, forward and backward, against float32; training, checkpoints, weights",
          "all pass, none is left out", 600, "suite", "tests/unit/workers/trainer/megatron/test_cuda.py", small=False),
    check("memory", "peak of a step over that of the fake step", "0.95 to 1.05", 300, "step", "memory"),
    check("waits", "waits of the host in a step, by the profiler, over the fake step's", "at most 2 more", 300, "step", "waits"),
    check("MFU 8k", "model FLOPs utilisation, micro-batches of 8,192 tokens", UTILISATION, 300, "utilisation", "8192", small=False),
    check("MFU 32k", "model FLOPs utilisation, micro-batches of 32,768 tokens", UTILISATION, 300, "utilisation", "32768", small=False),
    check("MFU mixture", "the same of four layers of Qwen3-30B-A3B, all experts on one GPU, micro-batches of 16,384 tokens",
          ">= 0.25 (NeMo AutoModel: 12,040 tokens/s a GPU of all 48, some 0.25)", 300, "utilisation", "16384", "mixture", small=False),
    check("publish", "weights from the GPU into pinned memory while it computes, right to the bit", ">= 40 GB/s", 180, "publish"),
    check("conformance", "every call that Headway makes, against SGLang with CUDA graphs", "all pass, none is left out", 900,
          "suite", "tests/conformance", small=False, sglang=True),
    check("log-probs", "mean difference between SGLang's and the trainer's, nats a token", "<= 0.03", 600, "runs", "agreement", sglang=True),
    check("resumed", "a run is killed and goes on from its checkpoint to its end", "it ends, with every step once", 900, "runs", "killed",
          sglang=True),
)
EIGHT = (
    check("layouts", "training in ten layouts over NCCL against Hugging Face's models and one rank, float32", "all pass, none is left out", 1200,
          "suite", "tests/wire/workers/trainer/megatron/parallel/test_layouts.py", num_gpus=8, small=False),
    check("all-reduce", "bus bandwidth of 1 GiB over all GPUs, of what nccl-tests reach", ">= 0.8 (of 480 GB/s, 8 H100)", 300, "allreduce",
          num_gpus=8),
    check("8B, 4 + 4", "seconds that generation stands still for new weights; share of time that training waits", "<= 1.5 s and <= 10%", 1800,
          "runs", "eight", num_gpus=8, small=False, sglang=True),
    check("drift", "half an hour: a step's time, and the memory of all processes, at the end over the beginning", "<= 1.1 and <= 1.1", 2400,
          "runs", "drift", num_gpus=8, sglang=True),
)

"""A training step on this GPU against the same step without one (workers/trainer/fake_device): `step memory|waits [--small]`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.acceptance import shapes
from benchmarks.acceptance.running import tell
from launcher.preflight.fake_step import measure
from workers.config import Config, Dtype, TrainerConfig
from workers.trainer.fake_device.full_batch import full_batch, signs
from workers.trainer.megatron.engine import MegatronEngine

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls of CUDA's runtime in which the host waits; copies in a stream wait by one of these."""


def config_of(tokens: int, length: int) -> Config:
    """One minibatch of two micro-batches of `tokens`."""
    config = Config()
    config.trainer = TrainerConfig(microbatch_tokens=tokens, num_minibatches=1, batch_groups=1024, dtype=Dtype.bfloat16)
    config.engine.dtype, config.engine.context_length, config.workflow.max_new_tokens = Dtype.bfloat16, length, length - length // 16
    config.workflow.group_size = 1
    return config


def prepared(config: Config, model: Path) -> Callable[[], object]:
    """A step of an engine that has made its optimizer's state."""
    engine = MegatronEngine(config, model)
    groups, minibatches = full_batch(config, engine.architecture.vocab_size, 2)

    def step() -> object:
        return engine.train_step(groups, minibatches, None, [signs(group.num_samples) for group in groups])

    step()
    return step


def peak(step: Callable[[], object]) -> int:
    """Bytes that the allocator has given out at most during a step; 0 on CPUs."""
    if not torch.cuda.is_available():
        step()
        return 0
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def waits(step: Callable[[], object]) -> int:
    """Calls in which the host waits for the device, in one step."""
    kinds = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with torch.profiler.profile(activities=kinds) as profile:
        step()
    return sum(event.count for event in profile.key_averages() if event.key in WAITS)


def main(what: str, *rest: str) -> None:
    """Measure both, and tell."""
    small = "--small" in rest
    config = config_of(512, 128) if small else config_of(8192, 4096)
    with tempfile.TemporaryDirectory() as folder:
        model = shapes.write_model(Path(folder), shapes.SMALL if small else shapes.QWEN3_06B)
        (expected,), step = measure(config, model, model, 1, [0]), prepared(config, model)
        if what == "memory":
            found = peak(step)
            tell(f"{found / expected['peak']:.3f}", 0.95 <= found / expected["peak"] <= 1.05,
                 f"{found / 2**30:.2f} GiB here, {expected['peak'] / 2**30:.2f} GiB by the fake step")
        else:
            number, budget = waits(step), sum(expected["step"]["waits"].values())
            tell(number, number <= budget + 2, f"{budget} by the fake step")


if __name__ == "__main__":
    main(*sys.argv[1:])

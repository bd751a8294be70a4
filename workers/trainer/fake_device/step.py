"""The figures of one rank's training step, as the config, the model's shapes and the layout make it.

    config, config.json --install (stand_ins.py)--> MegatronEngine, of which each line is the trainer's own
        |   responses as long as they may be, in whole micro-batches
        v
    train_step, twice (the first makes the optimizer's state) --operators.py--> bytes, operators, waits, exchanges of the second

What it cannot show: numbers that kernels compute, races between streams, NCCL's start, what the allocator loses to fragments.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.config import Config, Device
from workers.trainer.batch.pipeline_schedule import fewest_microbatches
from workers.trainer.fake_device import stand_ins
from workers.trainer.fake_device.full_batch import full_batch, signs
from workers.trainer.fake_device.operators import Call, Counts, Recorder
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.parallel.gang import Gang

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Figures:
    """Of one rank. Bytes on its device: `held` between steps, `peak` in one. `passes` are the counts of the last minibatch's forward and backward
    passes, of `num_microbatches` micro-batches of `tokens`; `step` those of the whole step, of `num_minibatches` minibatches. `calls`: its
    collectives and messages."""

    held: int
    peak: int
    tokens: int
    num_microbatches: int
    num_minibatches: int
    passes: Counts
    step: Counts
    calls: list[Call]


_recorder = Recorder()
_installed = False


def fake_step(config: Config, model_folder: Path, rank: int, world_size: int, first: bool = False) -> Figures:
    """The figures of rank `rank` of `world_size`. `model_folder` holds a config.json, and need not hold more. A minibatch has two micro-batches,
    or two for each pipeline stage. The process can do nothing else with the trainer afterwards, but may do this again.

    `first`: of the first step, in which the optimizer's state is made; it takes half the time, and its exchanges are those of every other.

    Raises ModelError or ConfigError on what cannot work.
    """
    global _installed
    if not _installed:
        stand_ins.install(_recorder)
        gc.freeze()  # the modules that are there by now need not be looked at again whenever an engine goes
        _installed = True
    stand_ins.join(rank, world_size)
    try:
        return _measured(config, model_folder, rank, world_size, first)
    finally:
        process_group.close()


def _measured(config: Config, folder: Path, rank: int, world_size: int, first: bool) -> Figures:
    trainer = dataclasses.replace(config.trainer, num_minibatches=min(2, config.trainer.num_minibatches), device=Device.auto)  # no GPU is asked for
    config = dataclasses.replace(config, trainer=trainer)
    gang = Gang(rank, world_size, rank % GPUS_PER_NODE, "127.0.0.1", 1) if world_size > 1 else None
    with _recorder:
        engine = MegatronEngine(config, folder, gang)
        groups, minibatches = full_batch(config, engine.architecture.vocab_size, max(2, fewest_microbatches(config.trainer.parallel.pp)))
        advantages = None if config.supervised or config.algorithm.critic else [signs(group.num_samples) for group in groups]
        if not first:
            engine.train_step(groups, minibatches, None, advantages)
            gc.collect()
        _recorder.begin()
        held = _recorder.live
        with _passes_apart(engine) as passes:
            engine.train_step(groups, minibatches, None, advantages)
        number = len(engine._policy.trained.passes._packed(groups, minibatches[-1]))
        figures = Figures(held, _recorder.peak, config.trainer.microbatch_tokens, number, len(minibatches), passes[-1], _recorder.counts,
                          _recorder.calls)
        _recorder.begin()  # into other lists
        engine.close()
    gc.collect()
    return figures


@contextmanager
def _passes_apart(engine: MegatronEngine) -> Iterator[list[Counts]]:
    """Inside, the passes of each of the policy's minibatches that have gradients are counted apart, too."""
    found: list[Counts] = []
    passes = engine._policy.trained.passes
    run = passes.run

    def counted(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("forward_only"):
            return run(*arguments, **keywords)
        before, _recorder.counts = _recorder.counts, Counts()
        try:
            return run(*arguments, **keywords)
        finally:
            found.append(_recorder.counts)
            _recorder.counts = _sum(before, _recorder.counts)

    passes.run = counted  # type: ignore[method-assign]
    yield found


def _sum(one: Counts, other: Counts) -> Counts:
    return Counts(**{field.name: getattr(one, field.name) + getattr(other, field.name) for field in dataclasses.fields(Counts)})

"""One rank of a training gang, as the tests start it: python -m tests.wire.ranks.trainer_rank FOLDER RANK WORLD PORT SCENARIO...

What a rank has found goes to FOLDER/SCENARIO.RANKofWORLD.npz.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.megatron_case import config, make_groups
from tests.support.megatron_case import train as train_on
from workers.trainer.megatron.checkpoint.checkpoint import CheckpointError
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import collectives, process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.megatron.parallel.stop_gate import StepAbandoned

Found = dict[str, Any]


def build(folder: Path, gang: Gang, **trainer: Any) -> MegatronEngine:
    setup = config(**{"lr": 1e-3, "adam_eps": 1e-5, "num_minibatches": 2, **trainer})
    return MegatronEngine(setup, folder / "model", gang)


def step(engine: MegatronEngine, number: int, num_groups: int = 4, **arguments: Any) -> dict[str, float]:
    groups = make_groups(num_groups, seed=number)
    groups[0].rewards = np.zeros(5, np.float32)  # passed forward only
    return train_on(engine, groups, **arguments)


def weights(engine: MegatronEngine, prefix: str = "") -> Found:
    """The whole model, which every rank of these gangs holds."""
    return {f"{prefix}weight:{name}": tensor.detach().float().numpy().copy() for name, tensor in engine._policy.trained.model.named_parameters()}


def measured(metrics: dict[str, float], prefix: str = "") -> Found:
    return {f"{prefix}metric:{name}": np.array(value) for name, value in metrics.items()}


def train(folder: Path, gang: Gang) -> Found:
    """Two steps; log-probs and entropies; steps whose minibatches are a single group, in one micro-batch."""
    engine = build(folder, gang)
    found = measured(step(engine, 1), "1:") | measured(step(engine, 2), "2:") | weights(engine, "2:")
    for name, values in zip(("logprobs", "entropy"), engine.logprobs_and_entropy(make_groups(5, seed=3)), strict=True):
        found[name] = np.concatenate([row for rows in values for row in rows])
    few = build(folder, gang, microbatch_tokens=4096)
    return found | measured(step(few, 4, num_groups=2), "4:") | measured(step(few, 5, num_groups=2), "5:") | weights(few, "5:")


def bfloat16(folder: Path, gang: Gang) -> Found:
    engine = build(folder, gang, dtype="bfloat16")
    return measured(step(engine, 1), "1:") | measured(step(engine, 2), "2:") | weights(engine, "2:")


def save(folder: Path, gang: Gang) -> Found:
    """A step, its state saved, and the next step."""
    engine = build(folder, gang)
    step(engine, 1)
    state = folder / f"state.{gang.world_size}"
    if gang.rank == 0:
        state.mkdir(mode=0o700)
    collectives.broadcast_bytes(b"" if gang.rank == 0 else None)
    engine.save_state(state)
    return measured(step(engine, 2)) | weights(engine)


def load(folder: Path, gang: Gang) -> Found:
    """What each of `save` saved, with the number of ranks that this gang has, and the next step."""
    found: Found = {}
    for saved in (1, 2):
        engine = build(folder, gang)
        engine.load_state(folder / f"state.{saved}")
        found |= measured(step(engine, 2), f"{saved}:") | weights(engine, f"{saved}:")
    try:
        engine.load_state(folder / "broken")
    except CheckpointError as error:
        found["refused"] = np.array(str(error))
    return found | measured(step(engine, 3), "after refusal:")


def stop(folder: Path, gang: Gang) -> Found:
    """The last rank alone is asked to stop, ever later; then the step is taken."""
    engine = build(folder, gang, microbatch_tokens=26)
    before, abandoned, asked = weights(engine), 0, 0

    def requested() -> bool:
        nonlocal asked
        asked += 1
        return gang.rank == gang.world_size - 1 and asked > abandoned

    while True:
        asked = 0
        try:
            metrics = step(engine, 1, num_groups=8, stop_requested=requested)
        except StepAbandoned:
            assert engine.num_steps == 0
            assert all(np.array_equal(before[name], value) for name, value in weights(engine).items())
            abandoned += 1
        else:
            return measured(metrics) | weights(engine) | {"abandoned": np.array(abandoned)}


def broadcast(folder: Path, gang: Gang) -> Found:
    process_group.initialize(gang)
    payloads = [b"", b"x", bytes(range(256)) * 5000]
    received = [collectives.broadcast_bytes(payload if gang.rank == 0 else None) for payload in payloads]
    assert received == payloads
    text = collectives.first_text("" if gang.rank == 0 else f"é of {gang.rank}")
    assert collectives.first_text("") == ""
    return {"text": np.array(text)}


def death(folder: Path, gang: Gang) -> Found:
    """The last rank dies in the middle of a step."""
    engine = build(folder, gang)
    step(engine, 1)
    try:
        step(engine, 2, stop_requested=lambda: os._exit(9) if gang.rank == gang.world_size - 1 else False)
    except RuntimeError as error:
        return {"error": np.array(str(error))}
    return {}


SCENARIOS: dict[str, Callable[[Path, Gang], Found]] = {
    action.__name__: action for action in (train, bfloat16, save, load, stop, broadcast, death)}


def main() -> None:
    folder, rank, world, port, *scenarios = sys.argv[1:]
    gang = Gang(int(rank), int(world), local_rank=int(rank), master_addr="127.0.0.1", master_port=int(port), interface="lo")
    for scenario in scenarios:
        found = SCENARIOS[scenario](Path(folder), gang)
        np.savez(Path(folder) / f"{scenario}.{rank}of{world}.npz", **found)
    if "death" in scenarios:
        os._exit(0)  # groups that broke cannot be taken down in order, and gloo's threads may abort a process whose interpreter ends before them
    process_group.close()


if __name__ == "__main__":
    main()

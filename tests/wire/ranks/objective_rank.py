"""One rank of a gang that trains with every algorithm's file, in layouts: python -m tests.wire.ranks.objective_rank FOLDER RANK WORLD PORT LAYOUT...

A layout is a name of LAYOUTS. What rank 0 has found goes to FOLDER/LAYOUT.json: metrics, and norms of the trained weights, by algorithm.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.support.algorithm_files import FILES, algorithm_of
from tests.support.megatron_case import config, make_groups
from tests.wire.gangs import in_turn
from workers.config import Advantage, Aggregation, AlgorithmConfig, ImportanceLevel, KlEstimator, OffPolicy
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import MegatronEngine
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.parallel.gang import Gang

LAYOUTS: dict[str, dict[str, int]] = {"alone": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "dp2": {}}
NAMES = [*FILES, "others"]
BY_TOKEN = {"cispo", "dapo", "decoupled_ppo_loglinear", "icepop", "ppo", "sapo"}
"""What differs from the others in what it does to single tokens alone. With HEADWAY_LONG=1 every layout has them."""
MINIBATCHES = [[0, 2, 4], [1, 3]]


def is_long(layout: str, name: str) -> bool:
    """Whether only long tests have an algorithm in a layout."""
    return name in BY_TOKEN and layout not in ("alone", "tp2")


def algorithm(name: str) -> AlgorithmConfig:
    """Of a file, or what no file has: weights of whole responses, a batch's norm, an entropy bonus, k2 in the loss."""
    if name == "others":
        return AlgorithmConfig(advantage=Advantage.batch_norm, off_policy=OffPolicy.clamp, behavior_level=ImportanceLevel.sequence, behavior_cap=2.0,
                               kl_weight=0.1, kl_estimator=KlEstimator.k2, entropy_weight=0.05, aggregation=Aggregation.sequence_mean)
    return replace(algorithm_of(name), critic_warmup_steps=0)


def batch(engine: MegatronEngine) -> list[TrainGroup]:
    """Groups near the policy, among them an episode of several responses; the same on every rank."""
    groups, rng = make_groups(5, seed=1), np.random.default_rng(1)
    groups[2].episodes, groups[2].rewards = np.array([0, 0, 1, 2, 2], np.int32), np.array([1, 1, -1, 0.5, 0.5], np.float32)
    for group, rows in zip(groups, engine.logprobs(groups), strict=True):
        group.behavior_logprobs = [row + rng.normal(-0.1, 0.4, row.shape).astype(np.float32) for row in rows]
        group.versions = [np.zeros(len(row), np.int32) for row in rows]
    return groups


def found(folder: Path, gang: Gang, layout: str, name: str) -> dict[str, float]:
    """The metrics of two steps of two minibatches, each divided among the copies, and the norm of every trained tensor."""
    setup = config(num_minibatches=2, lr=1e-3, adam_eps=1e-4)
    setup.algorithm = replace(algorithm(name), teacher=str(folder / "teacher") if name == "distillation" else "")
    for key, value in LAYOUTS[layout].items():
        setattr(setup.trainer.parallel, key, value)
    engine = MegatronEngine(setup, folder / "model", gang)
    groups, own, minibatches = batch(engine), [], []
    for part in MINIBATCHES:
        mine = part[process_group.copy_index()::process_group.num_copies()]
        minibatches.append(list(range(len(own), len(own) + len(mine))))
        own += mine
    steps = [engine.train_step([groups[index] for index in own], minibatches) for _ in range(2)]
    metrics = {f"{number}:{key}": value for number, step in enumerate(steps) for key, value in step.items()}
    return metrics | {f"weight:{key}": float(tensor.double().norm()) for key, tensor in engine.iter_hf_tensors()}


def main() -> None:
    folder, rank, world, port, *layouts = sys.argv[1:]
    for layout, gang in in_turn(layouts, int(rank), int(world), int(port)):
        every = os.environ.get("HEADWAY_LONG") == "1"
        results = {name: found(Path(folder), gang, layout, name) for name in NAMES if every or not is_long(layout, name)}
        if gang.rank == 0:
            (Path(folder) / f"{layout}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()

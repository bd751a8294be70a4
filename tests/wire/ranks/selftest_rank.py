"""One rank of a gang that compares log-probs in several layouts: python -m tests.wire.ranks.selftest_rank FOLDER RANK WORLD PORT LAYOUT...

Each rank writes what it has found to FOLDER/LAYOUT.RANK.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.megatron_case import make_groups, train
from tests.wire.gangs import in_turn
from tests.wire.ranks.parallel_rank import setup
from workers.trainer.batch.group import TrainGroup
from workers.trainer.megatron.engine import Comparison, MegatronEngine
from workers.trainer.megatron.parallel import process_group
from workers.trainer.megatron.parallel.gang import Gang
from workers.trainer.selftest.self_test import SelfTestFailed

NUM_MINIBATCHES = 2
KIND = "qwen3-tied"


def fresh_of(groups: list[TrainGroup]) -> list[list[np.ndarray]]:
    """Of every other response the first tokens, and no token of the last group."""
    return [[(np.arange(len(response)) < 3) & (number % 2 == 0) & (group is not groups[-1]) for number, response in enumerate(group.responses)]
            for group in groups]


def own_part(groups: list[TrainGroup]) -> list[int]:
    """The groups that this rank's copy is given by `train`."""
    parts = np.array_split(np.arange(len(groups)), NUM_MINIBATCHES)
    return [index for part in parts for index in part[process_group.copy_index()::process_group.num_copies()].tolist()]


def found(folder: Path, gang: Gang | None, layout: str) -> dict[str, Any]:
    """The gap of a step, what the judge was told, and what is left of a step that the judge has refused."""
    config = setup(layout)
    config.trainer.num_minibatches = NUM_MINIBATCHES
    engine = MegatronEngine(config, folder / KIND, gang)
    groups = make_groups(5, seed=3)
    fresh = [fresh_of(groups)[index] for index in own_part(groups)]
    told: list[float] = []

    def refuse(judged: Any, logprobs_at: Any) -> None:
        told.extend([judged.num_tokens, judged.mean, judged.max, judged.share])
        told.append(float(sum(row.sum() for rows in logprobs_at(1.0) for row in rows)))
        raise SelfTestFailed

    try:
        train(engine, groups, comparison=Comparison(fresh, refuse))
    except SelfTestFailed:
        told.append(engine.num_steps)
    metrics = train(engine, groups, comparison=Comparison(fresh, lambda *_: None))
    return {"told": np.array(told)} | {name: np.array(metrics[name]) for name in (
        "logprob_gap_mean", "logprob_gap_max", "num_tokens_compared", "loss", "grad_norm")}


def main() -> None:
    folder, rank, world, port, *layouts = sys.argv[1:]
    for layout, gang in in_turn(layouts, int(rank), int(world), int(port)):
        np.savez(Path(folder) / f"{layout}.{rank}.npz", **found(Path(folder), gang, layout))


if __name__ == "__main__":
    main()

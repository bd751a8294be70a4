"""One rank of a gang that trains algorithms in several layouts: python -m tests.oracles.layout_rank FOLDER RANK WORLD PORT LAYOUT...

A layout is a name of LAYOUTS. What rank 0 has found goes to FOLDER/LAYOUT.ALGORITHM.npz.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracles.whole_case import setup, trained_by_engine
from tests.wire.gangs import in_turn
from workers.config import Config
from workers.trainer.megatron.engine import MegatronEngine

LAYOUTS: dict[str, dict[str, Any]] = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}, "dp2": {}}
ALGORITHMS = ("gspo", "m2po", "reinforce_pp", "tis-sequence", "ppo-entropy-dual")
"""Of responses; of the whole batch, twice; of responses in another place; with a gradient of the entropy."""


def in_layout(name: str, layout: str) -> Config:
    result = setup(name)
    for key, value in LAYOUTS[layout].items():
        setattr(result.trainer.parallel, key, value)
    return result


def main() -> None:
    folder, rank, world, port, *layouts = sys.argv[1:]
    for layout, gang in in_turn(layouts, int(rank), int(world), int(port)):
        for name in ALGORITHMS:
            config = in_layout(name, layout)
            result = trained_by_engine(MegatronEngine(config, Path(folder), gang), Path(folder), config)
            if gang.rank == 0:
                np.savez(Path(folder) / f"{layout}.{name}.npz", **result)


if __name__ == "__main__":
    main()

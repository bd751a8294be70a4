"""`python -m workers.trainer.fake_device CONFIG MODEL WORLD_SIZE RANK ...`: the figures of these ranks' steps, one JSON object a line.

CONFIG is the file that the launcher writes for the workers, MODEL a folder with a config.json. The collectives of a rank are left out: they are
many, and only tests compare them. Exit status 2: what is wrong stands on standard error.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import msgspec

from workers.config import ConfigError, load
from workers.model.architecture import ModelError


def main(config_file: str, model: str, world_size: str, *ranks: str) -> int:
    """The exit status."""
    warnings.filterwarnings("ignore", category=UserWarning)  # Megatron-core tells what it would use if it were there
    from workers.trainer.fake_device.step import fake_step

    try:
        config = load(Path(config_file))
        for rank in ranks:
            figures = msgspec.to_builtins(fake_step(config, Path(model), int(rank), int(world_size)))
            print(msgspec.json.encode(figures | {"rank": int(rank), "calls": []}).decode(), flush=True)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

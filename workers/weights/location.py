"""Where versions of the weights are published. No torch: the coordinator removes the folder at the end of a run."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from workers.config import Config
from workers.rundir import RunFolder

MEMORY = Path("/dev/shm")


def weights_folder(config: Config, run: RunFolder) -> Path:
    """The folder of this run's versions: memory-backed ('auto'), in the run folder ('run'), or below a given folder."""
    if config.weights.dir == "run":
        return run.path / "weights"
    parent = (MEMORY if MEMORY.is_dir() else run.path) if config.weights.dir == "auto" else Path(config.weights.dir)
    unique = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
    return parent / f"headway-{os.getuid()}-{config.run.name}-{unique}"


def remove_weights(config: Config, run: RunFolder) -> None:
    """Remove all published versions of this run; to be called when nobody reads them any more."""
    shutil.rmtree(weights_folder(config, run), ignore_errors=True)

"""The command: `headway [overrides]` (or `python -m launcher`), and `headway status|watch|stop RUN`.

    overrides, conf/ --Hydra--> config --check, split--> plan --prepare--> run folder --submitit--> two job arrays
                                                                                |
                            terminal <--live view-- status.json, metrics <------+        Ctrl-C: end the run in order

Hydra's own flags work: --cfg job, --help, -m with comma-separated values for sweeps. `--dry-run` prints what would be
submitted; `--detach` returns as soon as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from launcher.arguments import USER_ERROR
from launcher.schema import register, to_object

CONF = Path(__file__).resolve().parent.parent / "conf"
FLAGS = {"--dry-run": "launch.dry_run=true", "--detach": "launch.detach=true", "--plain": "launch.plain=true"}


def compose_and_run(composed: DictConfig) -> int:
    """Check the composed config, then start a run. Errors of users are one line on stderr and exit status 2."""
    from launcher.launch import launch
    from workers.config import ConfigError
    from workers.rundir import RunFolderError

    try:
        return launch(to_object(composed))
    except (ConfigError, RunFolderError) as error:
        print(f"headway: {error}", file=sys.stderr)
        return USER_ERROR


def _hydra_main() -> int:
    """Run Hydra once, or for every combination of a sweep; returns the worst exit status."""
    worst = 0

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(composed: DictConfig) -> None:
        nonlocal worst
        worst = max(worst, compose_and_run(composed))

    run()
    return worst


def main() -> None:
    """Entry point of the console command."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("status", "watch", "stop"):
        import importlib

        sys.exit(importlib.import_module(f"launcher.{arguments[0]}").main(arguments[1:]))
    # Hydra takes overrides in one block, so what our own flags stand for goes to its end.
    sys.argv[1:] = [argument for argument in arguments if argument not in FLAGS] + [FLAGS[argument] for argument in arguments if argument in FLAGS]
    register()
    from launcher.launch import Interrupted

    try:
        sys.exit(_hydra_main())
    except Interrupted as error:  # the run has been ended in order; a sweep does not go on to the next one
        sys.exit(f"headway: ended by {error}")


if __name__ == "__main__":
    main()

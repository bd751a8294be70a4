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

from launcher.schema import register, to_object

CONF = Path(__file__).resolve().parent.parent / "conf"
FLAGS = {"--dry-run": "launch.dry_run=true", "--detach": "launch.detach=true", "--plain": "launch.plain=true"}
USER_ERROR = 2


def compose_and_run(composed: DictConfig) -> int:
    """Check the composed config, then start a run. Errors of users are one line on stderr and exit status 2."""
    from workers.config import ConfigError
    from workers.rundir import RunFolderError

    try:
        config = to_object(composed)
        from launcher.launch import launch

        return launch(config)
    except (ConfigError, RunFolderError) as error:
        print(f"headway: {error}", file=sys.stderr)
        return USER_ERROR


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def _hydra_main(composed: DictConfig) -> None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    status = compose_and_run(composed)
    if status and HydraConfig.get().mode == RunMode.RUN:
        sys.exit(status)


def main() -> None:
    """Entry point of the console command."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ("status", "watch", "stop"):
        import importlib

        sys.exit(importlib.import_module(f"launcher.{arguments[0]}").main(arguments[1:]))
    # Hydra takes overrides in one block, so what our own flags stand for goes to its end.
    sys.argv[1:] = [argument for argument in arguments if argument not in FLAGS] + [FLAGS[argument] for argument in arguments if argument in FLAGS]
    register()
    _hydra_main()


if __name__ == "__main__":
    main()

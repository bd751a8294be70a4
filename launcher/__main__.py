"""The command: `headway [overrides]` (or `python -m launcher`), `headway eval=NAME [overrides]`, `headway selftest [overrides]`,
`headway status|watch|logs|stop|resume|report RUN`.

    overrides, conf/ --Hydra--> config --check, split--> plan --prepare--> run folder --submitit--> two job arrays
                                                                                |
                            terminal <--live view-- status.json, metrics <------+

Ctrl-C ends a run on this machine in order; a run on SLURM goes on, and only the watching ends. Hydra's own flags work: --cfg job,
--help, -m with comma-separated values for sweeps. `--dry-run` prints what would be submitted; `--detach` returns as soon as it is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from launcher.arguments import USER_ERROR
from launcher.interrupts import Interrupted
from launcher.schema import register, to_object
from launcher.sweep import Sweep

CONF = Path(__file__).resolve().parent.parent / "conf"
FLAGS = {"--dry-run": "launch.dry_run=true", "--detach": "launch.detach=true", "--plain": "launch.plain=true",
         "--selftest": "launch.selftest=true", "--keep": "launch.keep=true"}


MULTIRUN = ("-m", "--multirun")
COMMANDS = ("status", "watch", "logs", "stop", "resume", "report")


def compose_and_run(composed: DictConfig, sweep: Sweep | None) -> int:
    """Check the composed config, then start a run. Errors of users are told on stderr, in one line each, with exit status 2."""
    from launcher.evaluation import complete
    from launcher.launch import launch
    from launcher.selftest import selftest
    from workers.config import ConfigError, RunKind
    from workers.rundir import RunFolderError
    from workers.slurm_command import SlurmError

    try:
        if composed.run.kind is RunKind.evaluation:
            complete(composed, list(HydraConfig.get().overrides.task))
        config = to_object(composed)
        return selftest(config) if config.launch.selftest else launch(config, sweep)
    except (ConfigError, RunFolderError, SlurmError) as error:
        print(f"headway: {error}", file=sys.stderr)
        return USER_ERROR


def _hydra_main() -> int:
    """Run Hydra once, or for every combination of a sweep, which has a page of its own in the end; returns the worst exit status."""
    worst, sweep = 0, None

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
    def run(composed: DictConfig) -> None:
        nonlocal worst, sweep
        sweep = _sweep()
        worst = max(worst, compose_and_run(composed, sweep))

    run()
    if sweep is not None:
        from launcher.report.ending import tell_sweep

        tell_sweep(sweep, print)
    return worst


def _sweep() -> Sweep | None:
    hydra_config = HydraConfig.get()
    if hydra_config.mode is not RunMode.MULTIRUN:
        return None
    return Sweep(Path(hydra_config.sweep.dir).absolute(), int(hydra_config.job.num), tuple(hydra_config.overrides.task))


def in_order(arguments: list[str]) -> list[str]:
    """Hydra takes overrides in one block: -m goes in front of it, and what our own flags stand for to its end."""
    sweep = [argument for argument in arguments if argument in MULTIRUN]
    rest = [argument for argument in arguments if argument not in FLAGS and argument not in MULTIRUN]
    return sweep + rest + [FLAGS[argument] for argument in arguments if argument in FLAGS]


def main() -> None:
    """Entry point of the console command."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["selftest"]:  # it takes what a run takes
        arguments = [*arguments[1:], "--selftest"]
    if arguments and arguments[0] in COMMANDS:
        import importlib

        sys.exit(importlib.import_module(f"launcher.{arguments[0]}").main(arguments[1:]))
    if not CONF.is_dir():
        print(f"headway: {CONF}: not found; the configuration stands beside the package. "
              "Install with `pip install -e .` from the checkout, not a copy of the packages", file=sys.stderr)
        sys.exit(USER_ERROR)
    sys.argv[1:] = in_order(arguments)
    register()
    try:
        sys.exit(_hydra_main())
    except Interrupted as error:  # a run on this machine has been ended in order; a sweep does not go on to the next one
        sys.exit(f"headway: ended by {error}")


if __name__ == "__main__":
    main()

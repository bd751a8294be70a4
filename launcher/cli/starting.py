"""`headway [run] ...`, `headway sweep ...`, `headway eval NAME ...`, `headway selftest ...`: what starts something.

    arguments --flags, KEY=VALUE--> composing: every combination, checked --> launch (or selftest), one after the other

Ctrl-C ends a run on this machine in order, and a sweep with it; a run on SLURM goes on, and only the watching ends.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import FAILED, USER_ERROR, Parser, refuse
from launcher.cli.help_page import COMMANDS, OF_HYDRA, RUN_FLAGS
from launcher.interrupts import Interrupted

if TYPE_CHECKING:
    from launcher.cli.composing import Composed, Composer
    from launcher.sweep import Sweep

FLAGS = {name: f"launch.{name.lstrip('-').replace('-', '_')}=true" for name in RUN_FLAGS}
INFOS = "all", "defaults", "defaults-tree", "config", "plugins", "searchpath"
USAGE = {
    "run": "headway [run] [--flags] [GROUP=OPTION ...] [KEY=VALUE ...]",
    "sweep": "headway sweep [--flags] [GROUP=OPTION,OPTION ...] [KEY=VALUE,VALUE ...]",
    "eval": "headway eval greedy|sampled [--flags] evaluation.run=RUN|model.path=FOLDER [KEY=VALUE ...]",
    "selftest": "headway selftest [--flags] [GROUP=OPTION ...] [KEY=VALUE ...]",
}
MORE = {
    "run": "A group brings many keys at once: `headway config` lists both, `headway config GROUP` its options.",
    "sweep": "Every combination of the values becomes a run in runs/sweeps/; all are checked before the first starts. On this machine they come one "
             "after the other, on SLURM launch.max_concurrent_runs says how many at once. hydra.sweep.dir=FOLDER says where they are made.",
    "eval": "evaluation.run=RUN judges that run's model on its data and with its settings, unless others are given; model.path=FOLDER any model "
            "(docs/evaluation.md).",
    "selftest": "A run of two steps with learning rate 0, from this config: exit status 0 where engine and trainer agree. docs/metrics.md.",
}


def parser_of(command: str) -> Parser:
    """Flags only: what else there is, are the groups and keys."""
    parser = Parser(prog=f"headway {command}", usage=USAGE[command], description=COMMANDS[command], epilog=f"{MORE[command]}\n\nalso\n{OF_HYDRA}",
                    formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    for name, line in RUN_FLAGS.items():
        parser.add_argument(name, action="store_true", help=line)
    parser.add_argument("-m", "--multirun", dest="sweep", action="store_true", help=argparse.SUPPRESS)
    for names, more in ((("-c", "--cfg"), {"choices": ["job", "hydra", "all"]}), (("-i", "--info"), {"nargs": "?", "const": "all"}),
                        (("-p", "--package"), {}), (("-cd", "--config-dir"), {})):
        parser.add_argument(*names, help=argparse.SUPPRESS, **more)  # type: ignore[arg-type]
    parser.add_argument("--resolve", action="store_true", help=argparse.SUPPRESS)
    return parser


def parsed(command: str, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The flags, the groups and keys, and the keys that flags stand for. Exits with status 2 on a flag that there is not."""
    parser = parser_of(command)
    options, rest = parser.parse_known_args(arguments)
    if options.info and "=" in options.info:  # of `--info KEY=VALUE`
        options.info, rest = "all", [options.info, *rest]
    if options.info not in (None, *INFOS):
        parser.error(f"there is no --info {options.info!r}. Use one of {', '.join(INFOS)}")
    for argument in rest:
        if argument.startswith("-"):
            plain, flags = argument.lstrip("-"), [*RUN_FLAGS, "--cfg", "--config-dir", "--info", "--resolve", "--help"]
            near = difflib.get_close_matches(argument.split("=")[0], flags, 1)
            parser.error(f"{argument}: there is no such flag. " + (f"Write {plain}, without dashes" if "=" in argument and not near
                                                                   else f"Did you mean {near[0]}?" if near else "`headway --help` shows them"))
    if command == "eval":
        named = [argument for argument in rest if "=" not in argument]
        if len(named) != 1 and not any(argument.startswith("eval=") for argument in rest):
            parser.error(f"give one kind of evaluation: {USAGE['eval']}")
        rest = [f"eval={argument}" if argument in named else argument for argument in rest]
    flags = [setting for name, setting in FLAGS.items() if getattr(options, name.lstrip("-").replace("-", "_"), False)]
    return options, rest, [*flags, *(["launch.selftest=true"] if command == "selftest" else [])]


def main(command: str, arguments: Sequence[str], conf: Path) -> int:
    """Command line of what starts something; returns the exit status, 2 where nothing was started."""
    options, given, flags = parsed(command, arguments)
    sweep = options.sweep or command == "sweep"
    # These take half a second: not before --help.
    from launcher.cli import composing
    from launcher.launch.on_slurm import new_run_path
    from launcher.sweep import Sweep, check_new
    from workers.config import ConfigError
    from workers.run.folder import RunFolderError

    try:
        with composing.opened(conf, Path(options.config_dir) if options.config_dir else None) as composer:
            if options.cfg or options.info:
                composing.show(composer, [*given, *flags], options)
                return 0
            combinations = composer.combinations(given, sweep)
            folder = composer.sweep_folder(given) if sweep else None
            checked = [_check(composer, one, flags, sweep) for one in combinations]
            sweeps = [Sweep(folder, number, one) if folder else None for number, one in enumerate(combinations)]
            if folder is not None:
                check_new(folder, [new_run_path(one.config, sweep) for one, sweep in zip(checked, sweeps, strict=True)])
    except (ConfigError, RunFolderError) as error:
        return refuse(str(error))
    try:
        statuses = [_start(one, sweep) for one, sweep in zip(checked, sweeps, strict=True)]
    except Interrupted as error:
        print(f"headway: {'the sweep was ' if sweep else ''}ended by {error.words}", file=sys.stderr)
        return FAILED
    if folder is not None:
        from launcher.report.ending import tell_sweep

        tell_sweep(Sweep(folder, 0, ()), print)
    return max(statuses) if len({status == USER_ERROR for status in statuses}) == 1 else FAILED  # refused is what started nothing at all


def _check(composer: Composer, combination: tuple[str, ...], flags: list[str], sweep: bool) -> Composed:
    """One combination, composed and checked; of a sweep, an error names it."""
    from workers.config import ClusterKind, ConfigError, require

    try:
        checked = composer.check([*combination, *flags])
        detached = sweep and checked.config.launch.detach and checked.config.cluster.kind is ClusterKind.local
        require(not detached, "launch.detach", True, "must be false for a sweep on this machine, whose runs come one after the other",
                "Leave out --detach, or start the sweep with nohup or in tmux")
        return checked
    except ConfigError as error:
        if not sweep:
            raise
        which = f"of the combination {' '.join(combination)}; " if combination else ""
        raise ConfigError(f"{error}\n({which}no run of the sweep was started)") from error


def _start(composed: Composed, sweep: Sweep | None) -> int:
    """Start one run. Errors of users are told on stderr, with exit status 2."""
    from launcher.launch.on_slurm import launch
    from launcher.launch.selftest import selftest
    from workers.config import ConfigError
    from workers.run.folder import RunFolderError
    from workers.slurm.command import SlurmError

    for note in composed.notes:
        print(f"note: {note}", flush=True)
    try:
        return selftest(composed.config) if composed.config.launch.selftest else launch(composed.config, sweep)
    except (ConfigError, RunFolderError, SlurmError) as error:
        return refuse(str(error))


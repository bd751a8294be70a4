"""The command: `headway COMMAND ...` (or `python -m launcher`); without one of `COMMANDS` it is `run`.

    run, sweep, eval, selftest   groups, keys --launcher/cli/--> checked config --launch/on_slurm.py--> run folder --submitit--> two job arrays
                                                                                                   |
    status, watch, logs, ...                terminal <--live view-- status.json, metrics <---------+

Exit status: 0 done, 1 failed, 2 refused (nothing was started). Nothing heavy is imported before it is known what is asked for.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from launcher.arguments import FAILED, refuse
from launcher.cli.help_page import COMMANDS, STARTS, WITH_VALUE, page
from launcher.share import CONF

UNUSABLE = {
    errno.EACCES: "you may not look into it. Ask whom it belongs to, or give a path of your own",
    errno.EPERM: "you may not do that there. Ask whom it belongs to, or give a path of your own",
    errno.ENAMETOOLONG: "is too long for the name of a file. Give a shorter path",
    errno.ELOOP: "is a symbolic link that leads to itself. Give another path",
}
MODULES = {"config": "launcher.cli.config_reference", "plan": "launcher.cli.plan",
           "runs": "launcher.cli.runs", "report": "launcher.report", "rollouts": "launcher.rollouts", "resume": "launcher.launch.resume",
           **{name: f"launcher.monitoring.{name}" for name in ("status", "watch", "logs", "replay", "trace", "stop")}}
"""Of the commands that start nothing."""
COMPOSING = "config", "plan"
"""Those of them that read conf/."""


def main() -> None:
    """Entry point of the console command."""
    sys.exit(status_of(lambda: dispatch(sys.argv[1:])))


def status_of(work: Callable[[], int]) -> int:
    """The exit status of `work`, also where Ctrl-C ends it, or nobody reads what it prints."""
    try:
        status = work()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = FAILED
        print("\nheadway: ended by Ctrl-C", file=sys.stderr)
    except BrokenPipeError:  # whoever read has seen enough, as in `headway runs | head`
        status = FAILED
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def dispatch(arguments: Sequence[str]) -> int:
    """Do what was asked for; returns the exit status. A path that cannot be looked at is refused, whichever of the arguments or files names it."""
    try:
        return _answer(arguments)
    except OSError as error:
        if told := _outage(error):
            print(f"headway: {told}", file=sys.stderr)
            return FAILED
        if error.errno not in UNUSABLE or not error.filename:
            raise
        return refuse(f"{error.filename}: {UNUSABLE[error.errno]}")
    except RuntimeError as error:  # of Path.expanduser
        if "home directory" not in str(error):
            raise
        return refuse("a path begins with ~NAME, and there is no user of that name here. Give the whole path")


def _outage(error: OSError) -> str:
    """What a command says that has waited for its run folder for too long; '' for other errors."""
    from workers.run.outage import OutageTooLong

    return str(error.strerror) if isinstance(error, OutageTooLong) else ""


def _answer(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help", "--version"):
        return _about(arguments)
    command, rest = command_of(arguments)
    if command not in STARTS and command not in COMPOSING:
        return importlib.import_module(MODULES[command]).main(rest)
    if not CONF.is_dir():
        return refuse(f"{CONF}: not found: this copy of Headway is not whole. "
                      "Install it again, from a wheel or from a checkout with its symbolic links")
    if command in COMPOSING:
        return importlib.import_module(MODULES[command]).main(rest, CONF)
    if any(one in arguments for one in ("--shell-completion", "-sc")):
        return _hydra(list(arguments))
    from launcher.cli import starting

    return starting.main(command, rest, CONF)


def command_of(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The command and what is for it: the first word, or for what starts something the first one behind flags (`headway --dry-run sweep ...`)."""
    values = {number + 1 for number, argument in enumerate(arguments) if argument in WITH_VALUE}
    place = next((number for number, argument in enumerate(arguments) if not argument.startswith("-") and number not in values), 0)
    if arguments[place] in (STARTS if place else COMMANDS):
        return arguments[place], [*arguments[:place], *arguments[place + 1:]]
    return "run", list(arguments)


def _about(arguments: Sequence[str]) -> int:
    """The page, or a command's own help."""
    if arguments[:1] == ["--version"]:
        from importlib.metadata import version

        print(f"headway {version('headway')}")
    elif arguments[:1] == ["help"] and len(arguments) > 1:
        if arguments[1] not in COMMANDS:
            return refuse(f"{arguments[1]}: there is no such command. Use one of {', '.join(COMMANDS)}")
        return dispatch([arguments[1], "--help"])
    else:
        print(page(), end="")
    return 0


def _hydra(arguments: list[str]) -> int:
    from launcher.cli import completion
    from workers.config import ConfigError

    try:
        completion.answer(arguments, CONF)
    except ConfigError as error:
        return refuse(str(error))
    return 0


if __name__ == "__main__":
    main()

"""Shell completion: Hydra knows the groups and keys; the commands in front of them are ours.

The shell asks with the line so far in COMP_LINE. What Hydra is told of it are the groups and keys alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.composing import hydra_itself
from launcher.cli.help_page import COMMANDS, TAKES_KEYS
from workers.config import ConfigError

_REQUEST = re.compile(r"(install|uninstall|query)=(bash|zsh|fish)")
_LINE = re.compile(r"^\s*(?P<program>\S+)\s+(?P<word>\S*)(?P<rest>.*)$", re.DOTALL)


def answer(arguments: Sequence[str], conf: Path) -> None:
    """Answer the shell, or print what it is to evaluate. Raises `ConfigError`."""
    if not any(_REQUEST.fullmatch(argument) for argument in arguments):
        raise ConfigError(f"{' '.join(arguments)}: must be --shell-completion install=SHELL or uninstall=SHELL, with bash, zsh or fish")
    match = _LINE.match(os.environ.get("COMP_LINE", ""))
    if match is not None and any(argument.startswith("query=") for argument in arguments):
        if not match["rest"]:
            print(" ".join(name for name in COMMANDS if name.startswith(match["word"])))
        elif match["word"] in COMMANDS and match["word"] not in TAKES_KEYS:  # what follows are folders, which the shell knows
            return
        elif match["word"] in TAKES_KEYS:
            os.environ["COMP_LINE"] = f"{match['program']} {match['rest'].lstrip()}"
    hydra_itself(list(arguments), conf)

"""The command line that `status`, `watch` and `stop` share: a run folder, and perhaps a switch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workers.rundir import RunFolder, RunFolderError

USER_ERROR = 2


def parse(name: str, description: str, arguments: list[str] | None, switch: tuple[str, str] | None = None) -> tuple[RunFolder, bool]:
    """The run folder, opened, and whether the switch (its name and help) is set. Exits with status 2 where there is no such run."""
    parser = argparse.ArgumentParser(prog=f"headway {name}", description=description)
    parser.add_argument("run", type=Path, help="run folder")
    if switch is not None:
        parser.add_argument(switch[0], dest="switch", action="store_true", help=switch[1])
    options = parser.parse_args(arguments)
    try:
        return RunFolder.open(options.run), getattr(options, "switch", False)
    except RunFolderError as error:
        print(error, file=sys.stderr)
        sys.exit(USER_ERROR)

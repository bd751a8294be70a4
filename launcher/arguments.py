"""What the command lines of `status`, `watch`, `stop`, ... share: a run folder, and how a mistake is told."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from workers.rundir import RunFolder, RunFolderError

USER_ERROR = 2


def add_run(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Let the command take a run folder; returns the parser."""
    parser.add_argument("run", type=Path, help="run folder")
    return parser


def open_run(path: Path) -> RunFolder:
    """The run folder. Exits with status 2 where there is no such run."""
    try:
        return RunFolder.open(path)
    except RunFolderError as error:
        print(error, file=sys.stderr)
        sys.exit(USER_ERROR)


def refuse(text: str) -> int:
    """Say on stderr why a command cannot do what it was asked for; returns the exit status."""
    print(f"headway: {text}", file=sys.stderr)
    return USER_ERROR

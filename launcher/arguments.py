"""What the command lines of `status`, `watch`, `stop`, ... share: their parser, a run folder, and how a mistake is told."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import NoReturn

from workers.run.folder import RunFolder, RunFolderError

FAILED, USER_ERROR = 1, 2


class Parser(argparse.ArgumentParser):
    """Tells mistakes as the rest of Headway does."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with status 2."""
        for words, ours in (("the following arguments are required: ", "give "), ("unrecognized arguments", "there is no such flag or argument")):
            message = message.replace(words, ours)
        message = re.sub(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)",
                         lambda found: f"there is no {found[1]} {found[2]}. Use one of {found[3].replace(chr(39), '')}", message)  # as of Python 3.12
        message = re.sub(r"argument (\S+): ignored explicit argument (.*)", r"\1 takes no value. Leave \2 out", message)
        message = re.sub(r"argument (\S+): invalid int value: (.*)", r"\1 \2: must be a whole number", message)
        message = re.sub(r"argument (\S+): expected one argument", r"\1 needs a value", message)
        message = message.replace(", KEY=VALUE", "") if message.startswith("give ") else message
        end = "" if message.endswith(("?", ".")) else "."
        self.exit(USER_ERROR, f"headway: {message}{end} `{self.prog} --help` shows what it takes\n")


def add_run(parser: Parser) -> Parser:
    """Let the command take a run folder; returns the parser."""
    parser.add_argument("run", metavar="RUN", type=Path, help="run folder, as runs/demo-20260101-120000-ab12; `headway runs` lists them")
    return parser


def open_run(path: Path) -> RunFolder:
    """The run folder. Exits with status 2 where there is no such run."""
    try:
        return RunFolder.open(path)
    except RunFolderError as error:
        sys.exit(refuse(_wrong_folder(path) or str(error)))
    except PermissionError:
        sys.exit(refuse(f"{path}: you may not look into it; a run belongs to who started it. Ask them, or log in as they do"))


def _wrong_folder(path: Path) -> str:
    """What a path is that is no run folder; '' where that is not the matter."""
    if (path / "config.json").is_file():
        return ""
    if not path.exists():
        others = sorted(path.parent.glob("*/jobs"), key=lambda jobs: jobs.stat().st_mtime)
        newest = f"The newest one there is {others[-1].parent}" if others else "`headway runs FOLDER` lists the runs in a folder"
        return f"{path}: not a run folder: there is no such folder. {newest}"
    if not path.is_dir():
        return f"{path}: not a run folder but a file. Give the folder of the run"
    if any(path.glob("*/jobs")):
        return f"{path}: not a run folder, but it holds some: headway runs {path}"
    return f"{path}: not a run folder (no config.json). `headway runs FOLDER` lists the runs in a folder"


def refuse(text: str) -> int:
    """Say on stderr why a command cannot do what it was asked for; returns the exit status."""
    print(f"headway: {text}", file=sys.stderr)
    return USER_ERROR

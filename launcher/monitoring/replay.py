"""`headway replay RUN`: what the coordinator was told, once more through the same code: it must decide the same, and come to the same states.

The journal (docs/replay.md) is replayed by a process of its own, as the launcher does not load what the coordinator does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

from rich.console import Console

from launcher.arguments import FAILED, USER_ERROR, Parser, add_run, open_run, refuse
from launcher.views import run_view
from launcher.views.queue_view import duration
from launcher.views.terminal import terminal
from workers.run.files import read_lines
from workers.run.folder import RunFolder

MODULE = "workers.coordinator.process.replay_run"


def place(text: str) -> list[str]:
    """What `--at` means to the process that replays. Raises `ArgumentTypeError`."""
    if text.isdecimal():
        return ["--at-step", text]
    try:
        return ["--until", repr(datetime.fromisoformat(text).timestamp())]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"--at {text}: must be a training step, or a time like 2026-01-31T23:59:59") from error


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 0 if all is as it was, 1 if something is not, 2 where nothing was recorded."""
    parser = add_run(Parser(prog="headway replay", description=(__doc__ or "").splitlines()[0]))
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--at", type=place, default=[], metavar="TIME|STEP", help="the state then, as `headway status` would have shown it")
    where.add_argument("--until-stall", action="store_true", help="the input after which nothing moved any more, and who waits for whom since then")
    parser.add_argument("--check", action="store_true", help="audit every invariant on the way: each prompt once, lineage, staleness, leases")
    parser.add_argument("--json", dest="as_json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    flags = [*options.at, *(["--until-stall"] if options.until_stall else []), *(["--check"] if options.check else [])]
    done = subprocess.run([sys.executable, "-m", MODULE, str(run.path), *flags], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode == USER_ERROR and done.stdout:
        return refuse(f"{run.path}: nothing was recorded there (run.journal_mb=0, or it has not begun)")
    if not done.stdout:
        return FAILED  # what went wrong has been printed
    told = json.loads(done.stdout)
    if options.as_json:
        print(json.dumps(told))
    else:
        tell(run, told, terminal(), show=bool(options.at or options.until_stall))
    return done.returncode


def tell(run: RunFolder, told: dict, console: Console, show: bool) -> None:
    """What the replay has shown; `show`: the state, too."""
    status = told["status"]
    for note in told["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    lives = ", ".join(map(str, told["incarnations"]))
    same = "the same decisions at each" + (f", the same state at {told['points']} points" if told["points"] else "")
    console.print(f"replayed {told['inputs']} inputs of incarnation {lives}: "
                  + (f"{told['points']} points agree, and then a difference" if told["difference"] else same), soft_wrap=True)
    if told["difference"]:
        console.print(f"first difference: {told['difference']}", style="bold red", soft_wrap=True)
    if told["findings"] == []:
        console.print("audit: each prompt once and none lost, lineage, staleness and leases as they must be")
    for finding in told["findings"] or ():
        console.print(f"audit: {finding}", style="bold red", soft_wrap=True)
    if moved := told["moved"]:
        silent = status["time"] - moved["wall"] if status else 0.0
        console.print(f"the last that moved: {moved['place']} at {datetime.fromtimestamp(moved['wall']):%Y-%m-%d %H:%M:%S}, {moved['input']}; "
                      f"the record ends {duration(silent)} later", soft_wrap=True)
    if show and status is None:
        console.print("this step was not finished in what is recorded")
    elif show:
        _panel(run, status, told["place"], console)


def _panel(run: RunFolder, status: dict, where: str, console: Console) -> None:
    def until(path: Path) -> list[dict]:
        return [record for record in read_lines(path) if record["step"] <= status["step"]]

    console.print(f"{where}, {datetime.fromtimestamp(status['time']):%Y-%m-%d %H:%M:%S}")
    console.print(run_view.panel(run.path.name, status, until(run.metrics), until(run.evaluations), status["time"], None))
    for part, what in status["waiting"].items():
        console.print(f"{part} waits for {what}" if what else f"{part} works", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())

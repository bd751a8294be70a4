"""`headway trace RUN`: what happened when (leases, generation, rewards, weights, batches, training steps), as a trace for https://ui.perfetto.dev.

It is made of the journal (docs/replay.md), by a process of its own, as the launcher does not load what the coordinator does: it costs a run nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path

from launcher.arguments import FAILED, USER_ERROR, Parser, add_run, open_run, refuse

MODULE = "workers.coordinator.process.trace_run"


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 1 where the journal cannot be replayed to its end, 2 where nothing was recorded."""
    parser = add_run(Parser(prog="headway trace", description=(__doc__ or "").splitlines()[0]))
    parser.add_argument("--steps", type=_steps, default=[], metavar="A:B",
                        help="from the finishing of step A to that of B; also A:, :B, and A for step A alone")
    parser.add_argument("--share", type=_share, default=1.0, help="of the leases (default 1: all of them)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write it (default RUN/trace.json.gz); compressed where it ends in .gz")
    options = parser.parse_args(arguments)
    run = open_run(options.run)
    path = (options.out or run.trace).absolute()
    if not path.parent.is_dir():
        return refuse(f"{path.parent}: there is no such folder. Give a file in one that is there")
    command = [sys.executable, "-m", MODULE, str(run.path), str(path), "--share", repr(options.share), *options.steps]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    if done.returncode == USER_ERROR and done.stdout:
        return refuse(f"{run.path}: nothing was recorded there (run.journal_mb=0, or it has not begun)")
    if not done.stdout:
        return FAILED  # what went wrong has been printed
    told = json.loads(done.stdout)
    for note in told["notes"]:
        print(f"note: {note}")
    if told["trouble"]:
        print(f"the journal cannot be replayed to its end: {told['trouble']}", file=sys.stderr)
    if not told["steps"]:
        return FAILED
    if not told["spans"]:
        return refuse(f"nothing happened in these steps; recorded are {told['steps'][0]} to {told['steps'][1]}. Give others with --steps A:B")
    print(f"trace {path}: {told['spans']} spans of {told['seconds']:.0f} s. Open it in https://ui.perfetto.dev, or chrome://tracing")
    return done.returncode


def _steps(text: str) -> list[str]:
    first, colon, last = text.partition(":")
    if not all(part.isdecimal() or not part for part in (first, last)) or not (first or last):
        raise ArgumentTypeError(f"{text}: must be A:B, A:, :B or A, with training steps for A and B")
    if not colon:
        first, last = str(int(first) - 1) if int(first) else "", first
    return [*(["--first", first] if first else []), *(["--last", last] if last else [])]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ArgumentTypeError(f"{text}: must be greater than 0 and at most 1")
    return share


if __name__ == "__main__":
    sys.exit(main())

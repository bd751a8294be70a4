"""`headway rollouts RUN`: what a run's models have said, newest first; `--html` makes a page of it to look around in."""

from __future__ import annotations

import itertools
import json
import re
import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.arguments import FAILED, Parser, add_run, open_run, refuse
from launcher.rollouts.kept_rows import MISSING, Range, Row, Wanted, parts, pieces, read, weights
from launcher.views.terminal import terminal
from launcher.views.visible_text import visible_text

WIDE = 160
NUM_SHOWN = 10
PROMPT_END = 400
"""Characters of a prompt that are shown, without --full: its end."""
TONES = "cyan", "yellow", "green", "magenta", "blue"
FAR = 1.5
"""A weight above this, or below one over this, is shown."""


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 where there is nothing to show."""
    parser = add_run(Parser(prog="headway rollouts", description=(__doc__ or "").splitlines()[0]))
    for flag, of in (("--step", "steps"), ("--reward", "rewards"), ("--tokens", "lengths")):
        parser.add_argument(flag, metavar="A:B", type=_range, default=Range(), help=f"{of} from A to B; also A:, :B, A ({flag}=-1: if negative)")
    parser.add_argument("--text", metavar="REGEX", type=_pattern, help="found in prompt or response")
    parser.add_argument("--prompt", metavar="ID", default="", help="of this prompt: how its answers have changed")
    parser.add_argument("--kind", choices=("train", "heldout"), default="", help="what was trained on, or evaluations")
    parser.add_argument("--colour", choices=tuple(TINTS), help="tokens by the weights that sampled them (default), or by "
                        f"importance weight: red above {FAR:g}, blue below {1 / FAR:.2g}")
    parser.add_argument("-n", "--number", type=int, help=f"samples to show (default {NUM_SHOWN})")
    parser.add_argument("--full", action="store_true", help="whole prompts")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="as_json", action="store_true", help="a JSON object a line, for programs")
    form.add_argument("--html", action="store_true", help="write RUN/rollouts.html")
    options = parser.parse_args(arguments)
    if without := _without_effect(options):
        return refuse(f"{without}: has no effect with {'--html, which shows as many as fit, whole' if options.html else '--json'}. Leave it out")
    run = open_run(options.run)
    if not parts(run.rollouts):
        return refuse(f"{run.rollouts}: nothing is kept there. Rollouts are kept from the first step on, unless rollout.keep=0")
    wanted = Wanted(options.step, options.reward, options.tokens, options.kind, options.prompt, options.text)
    try:
        if options.html:
            from launcher.rollouts import rollouts_page

            print(f"rollouts {rollouts_page.write(run, wanted)}")
            return 0
        number = NUM_SHOWN if options.number is None else max(0, options.number)
        return _show(itertools.islice(_newest(run.rollouts, wanted), number), options.as_json, options.full, options.colour or "version")
    except ImportError:
        return refuse(MISSING)
    except (ValueError, OSError) as error:
        print(f"headway: {error}", file=sys.stderr)
        return FAILED


def _without_effect(options: Namespace) -> str:
    """The options that say how samples are printed where none is; '' without any."""
    given = {"--number": options.html and options.number is not None, "--full": options.full, "--colour": options.colour is not None}
    return ", ".join(name for name, is_given in given.items() if is_given) if options.html or options.as_json else ""


def _range(text: str) -> Range:
    try:
        return Range.of(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text}: must be A:B, with numbers or nothing for A and B, or one number") from error


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ArgumentTypeError(f"{text}: is no regular expression ({error})") from error


def _newest(folder: Path, wanted: Wanted) -> Iterator[Row]:
    for part in filter(wanted.file, reversed(parts(folder))):
        yield from read(part, wanted)


def _show(rows: Iterator[Row], as_json: bool, full: bool, colour: str) -> int:
    console, found = terminal(), False
    console.width = console.width if console.is_terminal else WIDE
    for row in rows:
        found = True
        if as_json:
            print(json.dumps(row))
        else:
            _sample(console, row, full, TINTS[colour])
    if not found and not as_json:
        print("no kept sample is like that. `headway rollouts RUN` shows the newest")
    return 0


def _sample(console: Console, row: Row, full: bool, tint: Callable[[Row], list[str]]) -> None:
    versions = sorted(set(row["versions"]))
    ages = f", age {row['age']}" if row["kind"] == "train" else ""
    by = f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}"
    head = f"step {row['step']} {row['kind']}, {visible_text(row['prompt_id'])}, sample {row['sample']}: "
    figures = f"reward {row['reward']:g}, score {row['score']:g}, {row['num_tokens']} tokens by {by}{ages}"
    console.print(Text(head + figures, "bold"))
    prompt = row["prompt"] if full else row["prompt"][-PROMPT_END:]
    console.print(Text(f"{'' if prompt == row['prompt'] else '...'}{visible_text(prompt)}", "dim"))
    said = Text()
    for piece, style in zip(pieces(row), tint(row) if row["token_ends"] else [""], strict=True):
        said.append(visible_text(piece), style)
    console.print(said)
    console.print(Text(f"reference {visible_text(row['reference'])}\n" if row["reference"] else "", "dim"))


def _by_version(row: Row) -> list[str]:
    order = {version: TONES[place % len(TONES)] for place, version in enumerate(sorted(set(row["versions"]), reverse=True))}
    return [order[version] if len(order) > 1 else "" for version in row["versions"]]


def _by_weight(row: Row) -> list[str]:
    return ["" if weight is None or 1 / FAR <= weight <= FAR else "red" if weight > FAR else "blue" for weight in weights(row)]


TINTS: dict[str, Callable[[Row], list[str]]] = {
    "version": _by_version, "weight": _by_weight, "none": lambda row: [""] * len(row["tokens"])}

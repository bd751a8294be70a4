"""`headway plan [--from RUN] [GROUP=OPTION ...] [KEY=VALUE ...]`: what a config will give on its devices, before anything is submitted.

    arguments --composing--> checked config --launcher/prediction/--> tokens/s, a step's seconds, age, what limits, what would give more

Lengths of answers and what devices reach are assumptions: each can be given, and --from takes all of them from what an earlier run has measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.arguments import Parser, open_run, refuse
from launcher.cli.help_page import COMMANDS
from launcher.prediction.assumptions import UNITS

if TYPE_CHECKING:
    from workers.run.folder import RunFolder

SHARES = ("kept", "mfu", "decode_share", "prefill_share", "bandwidth_share")


def parser() -> Parser:
    """Flags; what else there is, are the groups and keys."""
    found = Parser(prog="headway plan", description=COMMANDS["plan"], allow_abbrev=False,
                   usage="headway plan [--from RUN] [--steps N] [--mean-tokens N ...] [GROUP=OPTION ...] [KEY=VALUE ...]",
                   epilog="--from RUN takes what that run has measured, and scales it to this config (docs/scaling.md).")
    found.add_argument("--from", dest="earlier", metavar="RUN", type=Path, help="run folder whose metrics say what is assumed otherwise")
    found.add_argument("--steps", type=int, help="training steps to reckon up (default run.num_steps)")
    found.add_argument("--json", dest="as_json", action="store_true", help="for programs")
    found.add_argument("--config-dir", type=Path, help="look for groups' files in this folder too")
    for name, what in UNITS.items():
        found.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="N", type=float, help=what)
    found.add_argument("settings", metavar="GROUP=OPTION, KEY=VALUE", nargs="*", help="as for a run")
    return found


def main(arguments: Sequence[str], conf: Path) -> int:
    """Command line; returns the exit status, 2 where there is no such config, model or run."""
    options = parser().parse_intermixed_args(arguments)
    from workers.config import ConfigError
    from workers.run.folder import RunFolderError

    given = {name: value for name in UNITS if (value := getattr(options, name)) is not None}
    if wrong := next((name for name, value in given.items() if not 0 < value < 1e9), ""):
        return refuse(f"--{wrong.replace('_', '-')} {given[wrong]:g}: must be greater than 0 and less than 1e9")
    if wrong := next((name for name in SHARES if given.get(name, 0) > 1), ""):
        return refuse(f"--{wrong.replace('_', '-')} {given[wrong]:g}: is a share, must be at most 1. A percentage is a hundredth of that")
    if options.steps is not None and options.steps < 1:
        return refuse(f"--steps {options.steps}: must be at least 1")
    earlier = open_run(options.earlier) if options.earlier else None
    try:
        for line in _lines(options.settings, options.config_dir, conf, earlier, given, options.steps, options.as_json):
            print(line)
    except (ConfigError, RunFolderError) as error:
        return refuse(str(error))
    return 0


def _lines(settings: Sequence[str], config_dir: Path | None, conf: Path, earlier: RunFolder | None, given: dict[str, float], num_steps: int | None,
           as_json: bool) -> list[str]:
    """What is printed. Raises `ConfigError`, `RunFolderError`."""
    from launcher.cli import composing
    from launcher.config.schema import read_full
    from launcher.launch.before_start import architecture_of
    from launcher.prediction import forecast, words
    from launcher.prediction.assumptions import usual
    from launcher.preflight import device_choice
    from workers.config import require
    from workers.run.files import read_lines

    with composing.opened(conf, config_dir) as composer:
        (combination,) = composer.combinations(settings, False)
        checked = composer.check(combination)
    config = checked.config
    for note in checked.notes:
        print(note, file=sys.stderr)
    forecast.check(config)
    cpu_gflops = device_choice.settle(config).cpu_gflops
    architecture, assumed = architecture_of(config, None), usual(config, cpu_gflops)
    if earlier is not None:
        before = read_full(earlier)
        measured = forecast.assume(before, architecture_of(before, earlier), read_lines(earlier.metrics), str(earlier.path))
        assumed = measured.for_answers_of(config)
    require(given.get("mean_tokens", 0.0) <= assumed.lengths.most, "--mean-tokens", given.get("mean_tokens"),
            f"must be at most workflow.max_new_tokens={assumed.lengths.most}", "Answers are cut off there")
    room = config.engine.context_length - config.workflow.max_new_tokens
    require(given.get("prompt_tokens", 0.0) <= room, "--prompt-tokens", given.get("prompt_tokens"),
            f"must be at most {room}, what workflow.max_new_tokens leaves of engine.context_length", "Longer prompts have no room for an answer")
    for name, value in given.items():
        assumed = assumed.given(name, value)
    devices = forecast.devices(config, assumed)
    require("cpu_gflops" not in given or not all(device.is_gpu for device in devices), "--cpu-gflops", given.get("cpu_gflops"),
            "must be left out, as everything runs on GPUs", "Their speed is that of cluster.*.gpu_type")
    found, steps = forecast.of(config, architecture, assumed), num_steps or config.run.num_steps
    more = forecast.better(config, architecture, assumed)
    if as_json:
        return [json.dumps({**asdict(found.prediction), "arrival_s": found.arrival_s, "num_devices": found.num_devices, "num_steps": steps,
                            "device_hours": found.gpu_hours(steps), "better": [{"keys": keys, "times": times} for keys, times in more],
                            "assumed": {name: {"value": value, "from": assumed.said.get(name, "usual")}
                                        for name, value in words.values(assumed, *devices).items()}})]
    return [f"plan: {config.plan().describe()}", *words.outcome(config, found, steps), *words.others(more), "assumed:",
            *words.assumed(assumed, *devices)]

"""Entry of the embedded engine's process.

    HEADWAY_ENGINE_API_KEY=... python -m workers.rollout.engines.servers.embedded --model-path DIR --parent-pid PID [...]

The parent reads one line {"port": N} from the pipe --ready-fd (or stdout) when the server answers. The process dies with
its parent (the kernel sends SIGKILL when the *thread* that started it ends, so start it from a thread that stays) and
ends at once on SIGTERM. Exit status 2: the model or an argument cannot work; 1: the engine failed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from workers.run.processes import end_with_parent

if TYPE_CHECKING:
    from workers.rollout.engines.servers.embedded.serve import Start

API_KEY_VARIABLE = "HEADWAY_ENGINE_API_KEY"


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The command line that every server of this API takes; `name` is the server's."""
    parser = argparse.ArgumentParser(prog=f"python -m workers.rollout.engines.servers.{name}", description=description)
    parser.add_argument("--model-path", required=True, help="folder of a Hugging Face model in safetensors format")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--num-slots", type=int, default=64, help="sequences decoded at once")
    parser.add_argument("--context-length", type=int, default=256, help="longest prompt plus answer, in tokens")
    parser.add_argument("--prefill-chunk", type=int, default=512, help="most prompt tokens computed between two decode steps")
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--weight-version", default="default", help="name of the starting weights in replies")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--ready-fd", type=int, default=1, help='file descriptor that is told {"port": N}')
    parser.add_argument("--seed", type=int, default=None, help="seed of requests without sampling_seed; without it every start differs")
    parser.add_argument("--parent-pid", type=int, required=True, help="the process whose end ends this one")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of this process. Exits with status 2 on a value that cannot work."""
    options = parser.parse_args()
    for name in ("num_slots", "context_length", "prefill_chunk", "num_threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1. Give 1 or more")
    return options


def run(options: argparse.Namespace, start: Callable[[], Start]) -> None:
    """Check the surroundings, then serve with what `start` imports: late, so that a process that must not run dies before that."""
    end_with_parent(options.parent_pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no state to save: the default action ends the process at once
    api_key = os.environ.pop(API_KEY_VARIABLE, "")
    if not api_key:
        print(f"{API_KEY_VARIABLE} is empty: every request needs an API key. Set it to a random string", file=sys.stderr)
        sys.exit(2)
    from workers.model.architecture import ModelError
    from workers.rollout.engines.servers.embedded.serve import serve

    try:
        serve(options, api_key, start())
    except ModelError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _forward() -> Start:
    from workers.rollout.engines.servers.embedded.model_runner import Forward

    return Forward.start


if __name__ == "__main__":
    options = parser("embedded", __doc__.splitlines()[0])
    options.add_argument("--enable-return-routed-experts", action="store_true", help="keep which experts of a mixture each token was sent to")
    run(parse(options), _forward)

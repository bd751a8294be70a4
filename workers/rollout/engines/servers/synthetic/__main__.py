"""Entry of the synthetic engine's process, for tests and benchmarks of everything but the model.

    HEADWAY_ENGINE_API_KEY=... python -m workers.rollout.engines.servers.synthetic --model-path DIR --parent-pid PID
        [--tokens-per-s 2000] [--mean-tokens 64] [...]

Command line, pipe, exit statuses and HTTP API are the embedded engine's (rollout/engines/servers/embedded/__main__.py), plus these two options,
and SGLang's three of a server over several nodes (meeting.py).
It loads no torch. The model folder gives the vocabulary, the end-of-sequence ids and, if it is there, the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from workers.model.architecture import Architecture
from workers.model.end_tokens import eos_ids
from workers.rollout.engines.servers.embedded.__main__ import parse, parser, run
from workers.rollout.engines.servers.embedded.serve import Start
from workers.rollout.engines.servers.synthetic.meeting import Others, add_flags, follow
from workers.rollout.engines.servers.synthetic.model import SyntheticModel


def positive(text: str) -> float:
    """A command line number that must be greater than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: must be greater than 0 and finite. Give a positive number")
    return value


def _start() -> Start:
    def start(options: argparse.Namespace, architecture: Architecture) -> SyntheticModel:
        if options.node_rank:
            with os.fdopen(options.ready_fd, "w", closefd=options.ready_fd > 2) as ready:
                ready.write(json.dumps({"port": 0}) + "\n")
            follow(options, architecture)
        return SyntheticModel(architecture, eos_ids(Path(options.model_path), architecture), options.tokens_per_s, options.mean_tokens,
                              elsewhere=Others(options).check)

    return start


def main() -> None:
    """Read the two further options, then serve."""
    options = parser("synthetic", (__doc__ or "").splitlines()[0])
    options.add_argument("--tokens-per-s", type=positive, default=2000.0, help="tokens a second, over all running requests")
    options.add_argument("--mean-tokens", type=positive, default=64.0, help="mean length of an answer that ends by itself")
    add_flags(options)
    run(parse(options), _start)


if __name__ == "__main__":
    main()

"""Puts the engine together from the command line's options and serves it until the process ends."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path

from workers.model.architecture import Architecture, ModelError, read_architecture
from workers.model.end_tokens import eos_ids
from workers.rollout.engines.servers.embedded.api import Limits
from workers.rollout.engines.servers.embedded.engine_loop import Compute
from workers.rollout.engines.servers.embedded.scheduler import Scheduler
from workers.rollout.engines.servers.embedded.server import Server
from workers.rollout.engines.servers.embedded.text import Text
from workers.rollout.http_serving import serving

Start = Callable[[argparse.Namespace, Architecture], Compute]


def serve(options: argparse.Namespace, api_key: str, start: Start) -> None:
    """Have `start` make what computes, bind 127.0.0.1, tell the parent the port, serve.

    Raises `ModelError` for a model that cannot be used.
    """
    folder = Path(options.model_path)
    architecture = read_architecture(folder)
    if options.context_length > architecture.max_positions:
        raise ModelError(f"--context-length {options.context_length}: must be at most the model's {architecture.max_positions} positions. "
                         "Give a smaller one")
    compute = start(options, architecture)
    scheduler = Scheduler(options.num_slots, options.context_length, options.prefill_chunk, options.weight_version)
    text = Text(folder) if (folder / "tokenizer.json").exists() else None
    limits = Limits(architecture.vocab_size, options.context_length, frozenset(eos_ids(folder, architecture)), text,
                    random.Random(options.seed))
    asyncio.run(_serve(options, lambda: Server(compute, scheduler, limits, architecture, folder, api_key)))


async def _serve(options: argparse.Namespace, make: Callable[[], Server]) -> None:
    server = make()
    server.start()
    listener = socket.create_server(("127.0.0.1", options.port))
    async with serving(server.application(), listener, handler_cancellation=True):
        with os.fdopen(options.ready_fd, "w", closefd=options.ready_fd > 2) as ready:
            ready.write(json.dumps({"port": listener.getsockname()[1]}) + "\n")
        await asyncio.Event().wait()

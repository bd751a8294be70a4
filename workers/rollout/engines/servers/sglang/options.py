"""What an SGLang server is started with. Pure."""

from __future__ import annotations

from pathlib import Path

from workers.config import EngineConfig
from workers.messages.parts import Version

KEPT_BACK = 2
"""Positions of a context that SGLang gives to no request: it would end the longest answers so much earlier."""


def flags(config: EngineConfig, model_folder: Path, version: Version) -> list[str]:
    """The flags of sglang.launch_server; address and key are added in its own process (start.py)."""
    parallel = config.parallel
    chosen = {
        "--model-path": str(model_folder), "--weight-version": str(version), "--dtype": config.dtype.value,
        "--context-length": str(config.context_length + KEPT_BACK), "--max-running-requests": str(config.num_slots),
        "--tp-size": str(parallel.tp), "--pp-size": str(parallel.pp), "--ep-size": str(parallel.ep),
        # Every request of a run would be a line of the log, and an idle scheduler would keep a core busy.
        "--log-level-http": "warning"}
    if parallel.dp_attention > 1:
        chosen["--attn-dp-size"] = str(parallel.dp_attention)
    if config.device:
        chosen["--device"] = config.device
    if config.mem_fraction:
        chosen["--mem-fraction-static"] = f"{config.mem_fraction:g}"
    return [word for flag, value in chosen.items() for word in (flag, value)] + [
        "--sleep-on-idle",
        "--skip-server-warmup",  # which needs a context that its text fits into; the worker has a token generated before it counts on the server
        *config.extra_args]

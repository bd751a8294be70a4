"""At which tokens a model's turn ends: for the engine, which stops there, and for supervised training, whose responses end with one."""

from __future__ import annotations

import json
from pathlib import Path

from workers.model.architecture import Architecture, ModelError


def eos_ids(folder: Path, architecture: Architecture) -> tuple[int, ...]:
    """End-of-sequence ids of config.json and of generation_config.json, where chat models often name a second one. Raises `ModelError`."""
    path = folder / "generation_config.json"
    if not path.exists():
        return architecture.eos_token_ids
    try:
        found = json.loads(path.read_text("utf-8")).get("eos_token_id")
    except ValueError as error:
        raise ModelError(f"{path}: not readable ({error}). Copy it again, or remove it") from error
    more = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys((*architecture.eos_token_ids, *more)))

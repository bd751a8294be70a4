"""At which tokens a model's turn ends: for the engine, which stops there, and for supervised training, whose responses end with one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from workers.model.architecture import Architecture, ModelError

MESSAGE_END = "<|eom_id|>"
"""Of Llama's turns that call a tool."""


class _Token(msgspec.Struct):
    id: int
    content: str


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []


class _Named(msgspec.Struct):
    eos_token: str | dict[str, Any] | None = None


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def token_text(token: object) -> str:
    """A special token of tokenizer_config.json, which is written in two ways."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def eos_ids(folder: Path, architecture: Architecture) -> tuple[int, ...]:
    """End-of-sequence ids of config.json, of generation_config.json, where chat models often name a second one, and of the tokenizer, at which
    SGLang stops as well (`Req` in sglang/srt/managers/schedule_batch.py). Raises `ModelError`."""
    more = _read(folder / "generation_config.json", _Generation).eos_token_id
    named = _read(folder / "tokenizer_config.json", _Named).eos_token
    texts = {MESSAGE_END} | ({token_text(named)} if named is not None else set())
    own = [token.id for token in _read(folder / "tokenizer.json", _Tokenizer).added_tokens if token.content in texts]
    return tuple(dict.fromkeys((*architecture.eos_token_ids, *(more if isinstance(more, list) else [] if more is None else [more]), *own)))


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{path}: not readable ({error}). Copy it again") from error

"""Prompts from JSONL files: one training file, one held-out file, read and checked whole before the run starts.

Each line is {"prompt": text, "answer": text or number, "response": text (optional), "id": text (optional), "verifier": name
(optional)}. The answer is what a verifier compares with; the response, in the column `data.response_field`, is what supervised training
learns, as it stands, and is the answer too where there is no other. Training goes through the file again and again, each time in another
order drawn from the seed.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import msgspec

from workers.config import ConfigError, DataConfig
from workers.data.prompts import Prompt, check_index
from workers.reward.verifiers import check_name

MAX_ID = 200


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    answer: str | int | float
    id: str | None = None
    verifier: str | None = None


class JsonlPrompts:
    """The prompts of `data.path` and `data.heldout_path`. Raises `ConfigError` naming file and line for whatever cannot work."""

    def __init__(self, config: DataConfig, verifier: str, seed: int, responses: bool = False) -> None:
        self._seed = seed
        field = config.response_field
        self._train = _read(Path(config.path), "data.path", verifier, field, responses)
        heldout = _read(Path(config.heldout_path), "data.heldout_path", verifier, field, responses)
        _check_disjoint(config, self._train, heldout)
        self._heldout = [prompt for _, prompt in heldout[:config.num_heldout]]
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`: every prompt once, in a new order, per pass over the file."""
        check_index(index)
        epoch, offset = divmod(index, len(self._train))
        return self._train[self._order(epoch)[offset]][1]

    def heldout(self) -> list[Prompt]:
        """The first `data.num_heldout` prompts of the held-out file, or all if it has fewer."""
        return list(self._heldout)

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _read(path: Path, key: str, verifier: str, field: str, responses: bool) -> list[tuple[int, Prompt]]:
    """The prompts of one file with their line numbers. Blank lines are skipped. `responses`: each must have one, in the column `field`."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{key}={str(path)!r}: not readable ({error.strerror}). Give a JSONL file") from error
    prompts: list[tuple[int, Prompt]] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompt = _parse(line, f"{path}:{number}", f"line/{number}", verifier, field, responses)
            if prompt.id in line_of_id:
                raise ConfigError(f"{path}:{number}: id {prompt.id!r} is also that of line {line_of_id[prompt.id]}; an id must be unique. Change one")
            line_of_id[prompt.id] = number
            prompts.append((number, prompt))
    if not prompts:
        raise ConfigError(f"{key}={str(path)!r}: holds no prompt. Each line must be like " '{"prompt": "1 + 1 =", "answer": 2}')
    return prompts


def _parse(line: bytes, place: str, default_id: str, verifier: str, field: str, responses: bool) -> Prompt:
    try:
        columns = msgspec.json.decode(line, type=dict[str, Any], strict=True)
        response = msgspec.convert(columns.get(field, ""), str | int | float, strict=True)
        if responses and response == "":
            raise ConfigError(f"{place}: no text in the column {field!r} (data.response_field): a supervised run needs a response for every prompt. "
                              'A line must be like {"prompt": "1 + 1 =", "' f'{field}": " 2"' "}")
        known = {"answer": response} if field in columns else {}
        parsed = msgspec.convert(known | {name: value for name, value in columns.items() if name != field}, _Line, strict=True)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: {error}. A line must be like " '{"prompt": "1 + 1 =", "answer": 2}; "id" and "verifier" are optional') from error
    if not parsed.prompt:
        raise ConfigError(f"{place}: the prompt is empty; there is nothing to continue. Give it text or delete the line")
    if parsed.id is not None and not 1 <= len(parsed.id) <= MAX_ID:
        raise ConfigError(f"{place}: the id has {len(parsed.id)} characters; it must have 1 to {MAX_ID}. Shorten it or leave it out")
    name = verifier if parsed.verifier is None else parsed.verifier
    check_name(name, f"{place}: verifier")
    return Prompt(id=default_id if parsed.id is None else parsed.id, text=parsed.prompt, verifier=name, reference=str(parsed.answer),
                  response=str(response))


def _check_disjoint(config: DataConfig, train: list[tuple[int, Prompt]], heldout: list[tuple[int, Prompt]]) -> None:
    line_of_text = {prompt.text: number for number, prompt in train}
    for number, prompt in heldout:
        if prompt.text in line_of_text:
            raise ConfigError(f"{config.heldout_path}:{number}: the same prompt is {config.path}:{line_of_text[prompt.text]}; a held-out prompt "
                              "must not be trained on. Delete one of the two")

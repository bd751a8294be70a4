"""Prompts from files: each is read once, as a stream, and checked whole before the run starts.

    held-out files --rows--> prompts, the first data.num_heldout are kept
    training files --rows--> prompts within the limits, none of them held out    (no held-out files: data.num_heldout drawn by the seed)

Training goes through them again and again, each time in another order drawn from the seed.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path

from workers.config import ConfigError, DataConfig, DataKind
from workers.data.dataset_folders import files_of_split
from workers.data.limits import Limits
from workers.data.mapping import RowMapping
from workers.data.prompt import Prompt, check_index
from workers.data.rows import read_rows, suffix

_ENDINGS = {DataKind.jsonl: (".jsonl", ".jsonl.gz", ".json"), DataKind.parquet: (".parquet",)}


class FilePrompts:
    """The prompts of `data.path`, and those held out. Raises `ConfigError` naming file and line for whatever cannot work."""

    def __init__(self, config: DataConfig, verifier: str, seed: int, limits: Limits, responses: bool = False) -> None:
        self._seed, self._limits, self._mapping = seed, limits, RowMapping(config, verifier, responses)
        self._notes: list[str] = []
        train_files, heldout_files = training_files(config), files_held_out(config)
        placed = list(self._read(train_files, "data.path"))
        self._train = [prompt for _, prompt in placed]
        if heldout_files:
            self._heldout = self._read_heldout(heldout_files, config.num_heldout, placed)
        else:
            self._split_off(config)
        self._notes.insert(0, f"{len(self._train)} training prompts of {config.path}, {len(self._heldout)} held out")
        self._order = functools.lru_cache(maxsize=2)(self._shuffle)

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`: every prompt once, in a new order, per pass over the files."""
        check_index(index)
        epoch, offset = divmod(index, len(self._train))
        return self._train[self._order(epoch)[offset]]

    def heldout(self) -> list[Prompt]:
        """The first `data.num_heldout` prompts of the held-out files, or all if there are fewer; or those drawn from the training files."""
        return list(self._heldout)

    def preview(self, count: int) -> Iterator[Prompt]:
        """Every training prompt, in the order of the files."""
        return iter(self._train)

    def notes(self) -> list[str]:
        """How many prompts there are, and how many were left out."""
        return list(self._notes)

    def _shuffle(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    def _read(self, files: list[Path], key: str) -> Iterator[tuple[str, Prompt]]:
        """The prompts within the limits, with their places."""
        place_of_id: dict[str, str] = {}
        num_rows = num_dropped = 0
        for path in files:
            for row in read_rows(path, key):
                num_rows += 1
                prompt = self._mapping.prompt(row, row.name if len(files) == 1 else f"{path.name}/{row.name}"[-150:])
                if prompt.id in place_of_id:
                    raise ConfigError(f"{row.place}: id {prompt.id!r} is also that of {place_of_id[prompt.id]}; an id must be unique. Change one")
                place_of_id[prompt.id] = row.place
                if self._limits.admits(prompt, row.place):
                    yield row.place, prompt
                else:
                    num_dropped += 1
        if not num_rows:
            raise ConfigError(f"{key}={str(files[0])!r}: holds no prompt. Each row must be like " '{"prompt": "1 + 1 =", "answer": 2}')
        if num_dropped == num_rows:
            raise ConfigError(f"{key}={str(files[0])!r}: all {num_rows} prompts are over the limits. "
                              "Raise data.max_prompt_tokens or data.max_reference_kb")
        if num_dropped:
            self._notes.append(f"{num_dropped} of {num_rows} prompts of {files[0] if len(files) == 1 else files[0].parent} left out, "
                               "since they are over the limits (data.max_prompt_tokens, data.max_reference_kb)")

    def _read_heldout(self, files: list[Path], count: int, trained: list[tuple[str, Prompt]]) -> list[Prompt]:
        """The first `count` held-out prompts; the rest is checked too."""
        first = [placed for number, placed in enumerate(self._read(files, "data.heldout_path")) if number < count]
        place_of_text = {prompt.asked: place for place, prompt in reversed(first)}
        for place, prompt in trained:
            if (text := prompt.asked) in place_of_text:
                raise ConfigError(f"{place_of_text[text]}: the same prompt is {place}; a held-out prompt must not be trained on. "
                                  "Delete one of the two")
        return [prompt for _, prompt in first]

    def _split_off(self, config: DataConfig) -> None:
        """Hold `data.num_heldout` prompts out of the training files, drawn by the seed; prompts with the same text go with them."""
        texts = list(dict.fromkeys(prompt.asked for prompt in self._train))
        if config.num_heldout >= len(texts):
            raise ConfigError(f"data.num_heldout={config.num_heldout}: {config.path} has {len(texts)} different prompts, and some must be left "
                              "to train on. Hold out fewer, or give data.heldout_path")
        chosen = set(random.Random(f"{self._seed}/heldout").sample(texts, config.num_heldout))
        first = {text: prompt for prompt in reversed(self._train) if (text := prompt.asked) in chosen}
        self._heldout = [first[text] for text in texts if text in chosen]
        self._train = [prompt for prompt in self._train if prompt.asked not in chosen]


def training_files(config: DataConfig) -> list[Path]:
    """The files that `data.path` means, at least one. Raises `ConfigError` if it is a folder without any."""
    if config.kind is DataKind.hf:
        return files_of_split(Path(config.path), config.split, config.subset)
    return _listed(Path(config.path), config.kind, "data.path")


def files_held_out(config: DataConfig) -> list[Path]:
    """The held-out files; [] where the training files serve for both. Raises `ConfigError`."""
    if config.kind is not DataKind.hf:
        return _listed(Path(config.heldout_path), config.kind, "data.heldout_path") if config.heldout_path else []
    if not config.heldout_path and not config.heldout_split:
        return []
    files = files_of_split(Path(config.heldout_path or config.path), config.heldout_split or config.split, config.subset, "data.heldout_")
    if files == training_files(config):
        raise ConfigError(f"data.heldout_split={config.heldout_split!r}: these are the files that are trained on. Name another split, or none: "
                          "then data.num_heldout prompts are held out of them")
    return files


def _listed(path: Path, kind: DataKind, key: str) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if suffix(file) in _ENDINGS[kind] and file.is_file())
    if not files:
        raise ConfigError(f"{key}={str(path)!r}: holds no file that ends in {' or '.join(_ENDINGS[kind])}. Give a file, or a folder with such files")
    return files

"""Procedural tasks of the reasoning-gym library, scored by the task's own `score_answer`.

Training prompts come from data sets of `CHUNK` items with a seed each, so that the index alone decides. Held-out
prompts come from seeds of their own; and since small tasks repeat questions whatever the seed, a training question
that is held out is replaced by the one at the same place of another data set.

A curriculum (`data.stages`) changes the options at declared training indices. Held-out prompts are of `data.options`, where it leads to.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
from collections.abc import Iterator
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from workers.config import ConfigError, DataConfig
from workers.data.limits import MAX_TRIES, SPARE
from workers.data.prompt import Prompt, check_index
from workers.reward.verifiers.gym import encode_reference
from workers.reward.verifiers.registry import modules

CHUNK = 500
_HELDOUT_SEEDS = 2**30
"""Seeds below this train; seeds from here on are held out."""
_UNSTABLE = {"isomorphic_strings", "polynomial_multiplication", "ransom_note"}
"""Their questions follow Python's hash seed, another one in every process: no order, and nothing held out, would outlive a restart."""
_RESERVED = {"seed": "it follows from run.seed", "size": "training is endless and data.num_heldout bounds the rest"}


class GymPrompts:
    """One task with its options. Raises `ConfigError` for an unknown task or options, or if the task has too few questions."""

    def __init__(self, config: DataConfig, verifier: str, seed: int) -> None:
        if ":" not in verifier and "workers.reward.verifiers.gym" not in modules(verifier):
            raise ConfigError(f"reward.verifier={verifier!r}: data.kind=reasoning_gym is scored by its task. Set reward.verifier=reasoning_gym")
        _check_task(config.task)
        _check_options(config.task, config.options, "data.options")
        for number, stage in enumerate(config.stages):
            _check_options(config.task, stage.options, f"data.stages[{number}].options")
        self._task = config.task
        self._options = dict(config.options)
        self._stages = [(stage.until, {**config.options, **stage.options}) for stage in config.stages]
        self._verifier = verifier
        self._seed = seed
        self._chunk = functools.lru_cache(maxsize=8)(self._make_chunk)
        self._num_heldout = config.num_heldout
        self._heldout = self._draw_heldout()
        self._heldout_texts = frozenset(prompt.text for prompt in self._heldout)
        for number in range(len(self._stages)):
            self._create(number, seed=0, size=1)

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises `ConfigError` if only held-out questions can be found for it."""
        check_index(index)
        chunk, offset = divmod(index, CHUNK)
        stage = self.stage(index)
        for attempt in range(MAX_TRIES):
            prompt = self._prompt(f"train/{index}", self._chunk("train", chunk, attempt, stage)[offset], stage)
            if prompt.text not in self._heldout_texts:
                return prompt
        raise self._too_few()

    def heldout(self) -> list[Prompt]:
        """`data.num_heldout` different prompts, none of them a training prompt."""
        return list(self._heldout)

    def preview(self, count: int) -> Iterator[Prompt]:
        """`count` training prompts, the first of every stage."""
        starts = [0, *(until for until, _ in self._stages)]
        return (self.train(start + offset) for start in starts for offset in range(-(-count // len(starts))))

    def notes(self) -> list[str]:
        """Nothing."""
        return []

    def stage(self, index: int) -> int:
        """Which stage training prompt `index` belongs to, or one that stands in for it; the last is behind all stages."""
        return sum(until <= index % SPARE for until, _ in self._stages)

    def _stage_options(self, stage: int) -> dict[str, str | int | float | bool]:
        return self._stages[stage][1] if stage < len(self._stages) else self._options

    def _draw_heldout(self) -> list[Prompt]:
        found: dict[str, Prompt] = {}
        last = len(self._stages)
        for index in range(MAX_TRIES * self._num_heldout):
            chunk, offset = divmod(index, CHUNK)
            entry = self._chunk("heldout", chunk, 0, last)[offset]
            if index == 0:
                self._check_json(entry)
            prompt = self._prompt(f"heldout/{len(found)}", entry, last)
            found.setdefault(prompt.text, prompt)
            if len(found) == self._num_heldout:
                return list(found.values())
        raise self._too_few()

    def _make_chunk(self, part: str, chunk: int, attempt: int, stage: int) -> Any:
        digest = hashlib.sha256(f"{self._seed}/{part}/{chunk}/{attempt}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") % (_HELDOUT_SEEDS - CHUNK) + (_HELDOUT_SEEDS if part == "heldout" else 0)
        return self._create(stage, seed, CHUNK)

    def _create(self, stage: int, seed: int, size: int) -> Any:
        options = self._stage_options(stage)
        try:
            return reasoning_gym.create_dataset(self._task, **options, seed=seed, size=size)
        except (AssertionError, TypeError, ValueError) as error:
            key = f"data.stages[{stage}].options" if stage < len(self._stages) else "data.options"
            raise ConfigError(f"{key}={options!r}: task {self._task!r} refuses them ({error}). "
                              f"Its options are {_describe_options(self._task)}") from error

    def _prompt(self, name: str, entry: dict[str, Any], stage: int) -> Prompt:
        answer = entry.get("answer")
        reference = encode_reference(self._task, self._stage_options(stage), entry)
        return Prompt(name, entry["question"], self._verifier, reference, response="" if answer is None else f" {answer}")

    def _check_json(self, entry: dict[str, Any]) -> None:
        """The entry travels as JSON: refuse a task that judges its own answer differently after that."""
        dataset = self._chunk("heldout", 0, 0, len(self._stages))
        answer = entry["answer"]
        if dataset.score_answer(answer, entry) != dataset.score_answer(answer, json.loads(json.dumps(entry))):
            raise ConfigError(f"data.task={self._task!r}: its entries do not survive JSON, in which they travel to the verifier. Use another task")

    def _too_few(self) -> ConfigError:
        return ConfigError(f"data.num_heldout={self._num_heldout}: task {self._task!r} with options "
                           f"{self._options!r} has too few different questions to hold that many out and train on others. "
                           "Hold out fewer, or widen data.options")


def _check_task(task: str) -> None:
    legal = sorted(set(DATASETS) - {"composite"} - _UNSTABLE)  # a composite is made of data sets, which flat options cannot say
    if task not in legal:
        near = difflib.get_close_matches(task, legal, n=3)
        hint = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
        raise ConfigError(f"data.task={task!r}: reasoning-gym has no such task; {hint}Use one of {', '.join(legal)}")


def _check_options(task: str, options: dict[str, str | int | float | bool], key: str) -> None:
    legal = _options(task)
    for name, value in options.items():
        if name in _RESERVED:
            raise ConfigError(f"{key}.{name}={value!r}: cannot be set, for {_RESERVED[name]}. Leave it out")
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{key}.{name}={value!r}: task {task!r} has no such option; {hint}Its options are {_describe_options(task)}")


def _options(task: str) -> list[str]:
    return [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in _RESERVED]


def _describe_options(task: str) -> str:
    return ", ".join(_options(task)) or "none"

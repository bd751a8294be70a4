"""Procedural tasks of the reasoning-gym library, scored by the task's own `score_answer`.

Training prompts come from data sets of `CHUNK` items with a seed each, so that the index alone decides. Held-out
prompts come from seeds of their own; and since small tasks repeat questions whatever the seed, a training question
that is held out is replaced by the one at the same place of another data set.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from workers.config import ConfigError, DataConfig
from workers.data.prompts import Prompt, check_index
from workers.reward.gym import encode_reference

CHUNK = 500
MAX_TRIES = 64
_HELDOUT_SEEDS = 2**30
"""Seeds below this train; seeds from here on are held out."""
_RESERVED = {"seed": "it follows from run.seed", "size": "training is endless and data.num_heldout bounds the rest"}


class GymPrompts:
    """One task with its options. Raises `ConfigError` for an unknown task or options, or if the task has too few questions."""

    def __init__(self, config: DataConfig, verifier: str, seed: int) -> None:
        if verifier != "reasoning_gym" and ":" not in verifier:
            raise ConfigError(f"reward.verifier={verifier!r}: data.kind=reasoning_gym is scored by its task. Set reward.verifier=reasoning_gym")
        _check_task(config.task)
        _check_options(config)
        self._task = config.task
        self._options = dict(config.options)
        self._verifier = verifier
        self._seed = seed
        self._chunk = functools.lru_cache(maxsize=4)(self._make_chunk)
        self._num_heldout = config.num_heldout
        self._heldout = self._draw_heldout()
        self._heldout_texts = frozenset(prompt.text for prompt in self._heldout)

    def train(self, index: int) -> Prompt:
        """Training prompt number `index`. Raises `ConfigError` if only held-out questions can be found for it."""
        check_index(index)
        chunk, offset = divmod(index, CHUNK)
        for attempt in range(MAX_TRIES):
            prompt = self._prompt(f"train/{index}", self._chunk("train", chunk, attempt)[offset])
            if prompt.text not in self._heldout_texts:
                return prompt
        raise self._too_few()

    def heldout(self) -> list[Prompt]:
        """`data.num_heldout` different prompts, none of them a training prompt."""
        return list(self._heldout)

    def _draw_heldout(self) -> list[Prompt]:
        found: dict[str, Prompt] = {}
        for index in range(MAX_TRIES * self._num_heldout):
            chunk, offset = divmod(index, CHUNK)
            entry = self._chunk("heldout", chunk, 0)[offset]
            if index == 0:
                self._check_json(entry)
            prompt = self._prompt(f"heldout/{len(found)}", entry)
            found.setdefault(prompt.text, prompt)
            if len(found) == self._num_heldout:
                return list(found.values())
        raise self._too_few()

    def _make_chunk(self, part: str, chunk: int, attempt: int) -> Any:
        digest = hashlib.sha256(f"{self._seed}/{part}/{chunk}/{attempt}".encode()).digest()
        seed = int.from_bytes(digest[:8], "big") % (_HELDOUT_SEEDS - CHUNK) + (_HELDOUT_SEEDS if part == "heldout" else 0)
        try:
            return reasoning_gym.create_dataset(self._task, **self._options, seed=seed, size=CHUNK)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(f"data.options={self._options!r}: task {self._task!r} refuses them ({error}). "
                              f"Its options are {_describe_options(self._task)}") from error

    def _prompt(self, name: str, entry: dict[str, Any]) -> Prompt:
        answer = entry.get("answer")
        return Prompt(id=name, text=entry["question"], verifier=self._verifier, reference=encode_reference(self._task, self._options, entry),
                      response="" if answer is None else f" {answer}")

    def _check_json(self, entry: dict[str, Any]) -> None:
        """The entry travels as JSON: refuse a task that judges its own answer differently after that."""
        dataset = self._chunk("heldout", 0, 0)
        answer = entry["answer"]
        if dataset.score_answer(answer, entry) != dataset.score_answer(answer, json.loads(json.dumps(entry))):
            raise ConfigError(f"data.task={self._task!r}: its entries do not survive JSON, in which they travel to the verifier. Use another task")

    def _too_few(self) -> ConfigError:
        return ConfigError(f"data.num_heldout={self._num_heldout}: task {self._task!r} with options "
                           f"{self._options!r} has too few different questions to hold that many out and train on others. "
                           "Hold out fewer, or widen data.options")


def _check_task(task: str) -> None:
    legal = sorted(set(DATASETS) - {"composite"})  # a composite is made of data sets, which flat options cannot say
    if task not in legal:
        near = difflib.get_close_matches(task, legal, n=3)
        hint = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
        raise ConfigError(f"data.task={task!r}: reasoning-gym has no such task; {hint}Use one of {', '.join(legal)}")


def _check_options(config: DataConfig) -> None:
    legal = _options(config.task)
    for name in config.options:
        if name in _RESERVED:
            raise ConfigError(f"data.options.{name}={config.options[name]!r}: cannot be set, for {_RESERVED[name]}. Leave it out")
        if name not in legal:
            near = difflib.get_close_matches(name, legal, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"data.options.{name}={config.options[name]!r}: task {config.task!r} has no such option; {hint}"
                              f"Its options are {_describe_options(config.task)}")


def _options(task: str) -> list[str]:
    return [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in _RESERVED]


def _describe_options(task: str) -> str:
    return ", ".join(_options(task)) or "none"

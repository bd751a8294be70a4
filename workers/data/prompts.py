"""What a prompt is, what a source of prompts promises, and the factory that opens the configured one.

A source is a pure function of the config and the seed: `train(index)` gives the same prompt in every process and after
every restart, so order and resumption follow from the index alone and no source keeps a position.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.reward.verifiers import check_name


@dataclass(frozen=True)
class Prompt:
    """One question. `id` names it within its source; `reference` is what `verifier` needs to judge an answer (text or JSON). `response`:
    the answer that supervised training learns, as it follows the text; '' where the source knows none."""

    id: str
    text: str
    verifier: str
    reference: str
    response: str = ""


class PromptSource(Protocol):
    """Endless training prompts by index, and a fixed held-out set that shares no prompt with them."""

    def train(self, index: int) -> Prompt:
        """Training prompt number `index` (0 or more; there is no last one)."""
        ...

    def heldout(self) -> list[Prompt]:
        """The held-out prompts, at most `data.num_heldout` of them, always the same in the same order."""
        ...


def open_prompts(config: DataConfig, reward: RewardConfig, seed: int, model_folder: Path | None = None, responses: bool = False) -> PromptSource:
    """The prompt source that `config` names. `model_folder` holds the chat template and is needed for data.chat_template only. `responses`:
    prompts of files must have one.

    Raises `ConfigError` for data, options or files that cannot work.
    """
    check_name(reward.verifier)
    source = _open(config, reward, seed, responses)
    if not config.chat_template:
        return source
    if model_folder is None:
        raise ConfigError("data.chat_template=True: needs the model's folder, which is not known here. Set model.path")
    from workers.data.chat import ChatPrompts, ChatTemplate

    return ChatPrompts(source, ChatTemplate(model_folder))


def _open(config: DataConfig, reward: RewardConfig, seed: int, responses: bool) -> PromptSource:
    # Imported here, so that a run pays only for the source that it uses.
    if config.kind is DataKind.arithmetic:
        from workers.data.arithmetic import ArithmeticPrompts

        return ArithmeticPrompts(config, reward.verifier, seed)
    if config.kind is DataKind.reasoning_gym:
        from workers.data.gym import GymPrompts

        return GymPrompts(config, reward.verifier, seed)
    if config.kind is DataKind.jsonl:
        from workers.data.jsonl import JsonlPrompts

        return JsonlPrompts(config, reward.verifier, seed, responses)
    raise ConfigError(f"data.kind={config.kind!r}: no such kind. Use one of {', '.join(kind.value for kind in DataKind)}")


def check_index(index: int) -> None:
    """Raise `IndexError` unless `index` is a training index."""
    if index < 0:
        raise IndexError(f"training prompt {index}: indices start at 0")


def with_text(prompt: Prompt, text: str, response: str) -> Prompt:
    """`prompt` with another `text` and `response`."""
    return dataclasses.replace(prompt, text=text, response=response)

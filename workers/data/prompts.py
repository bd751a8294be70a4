"""What a prompt is, what a source of prompts promises, and the factory that opens the configured one.

    arithmetic, reasoning_gym: index, seed --> Prompt --> within the limits, or another in its place (limits.py) -----+
    jsonl, parquet, hf: rows (rows.py) --> Prompt (mapping.py) --> within the limits, held out, in order (files.py) --+
    data.chat_template: rendered (chat.py) <--------------------------------------------------------------------------+
    mixture: one of several such sources for each index (mixture.py)

A source is a pure function of the config and the seed: `train(index)` gives the same prompt in every process and after
every restart, so order and resumption follow from the index alone and no source keeps a position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from workers.config import ConfigError, DataConfig, DataKind, RewardConfig
from workers.data.limits import Limits, Replaced
from workers.reward.verifiers import check_name, composed

if TYPE_CHECKING:
    from workers.data.chat import ChatTemplate

Message = tuple[str, str]
"""Role and content of a chat message."""


@dataclass(frozen=True)
class Prompt:
    """One question. `id` names it within its source; `reference` is what `verifier` needs to judge an answer (text or JSON). `response`:
    the answer that supervised training learns, as it follows the text; '' where the source knows none. `messages`: the chat that the prompt is,
    where it is one; it becomes the text when it is rendered. `place`: file and line, of those that come from files."""

    id: str
    text: str
    verifier: str
    reference: str
    response: str = ""
    messages: tuple[Message, ...] = ()
    place: str = dataclasses.field(default="", compare=False)

    @property
    def where(self) -> str:
        """What errors call it."""
        return self.place or f"prompt {self.id}"


class PromptSource(Protocol):
    """Endless training prompts by index, and a fixed held-out set that shares no prompt with them."""

    def train(self, index: int) -> Prompt:
        """Training prompt number `index` (0 or more; there is no last one)."""
        ...

    def heldout(self) -> list[Prompt]:
        """The held-out prompts, at most `data.num_heldout` of them, always the same in the same order."""
        ...

    def preview(self, count: int) -> Iterator[Prompt]:
        """Training prompts to look at before a run: every one where they are known, else the first `count`."""
        ...

    def notes(self) -> list[str]:
        """What is worth saying before a run, a line each: how much there is, and what was left out."""
        ...


def open_prompts(config: DataConfig, reward: RewardConfig, seed: int, model_folder: Path | None = None, responses: bool = False) -> PromptSource:
    """The prompt source that `config` names. `model_folder` holds chat template and tokenizer, needed for data.chat_template and
    data.max_prompt_tokens only. `responses`: prompts of files must have one.

    Raises `ConfigError` for data, options or files that cannot work.
    """
    check_name(composed(reward.verifier, reward.parts))
    if config.kind is DataKind.mixture:
        from workers.data.mixture import open_mixture

        return open_mixture(config, reward, seed, model_folder, responses)
    verifier = config.verifier or reward.verifier
    check_name(verifier, "data.verifier" if config.verifier else "reward.verifier")
    template = _template(config, model_folder)
    limits = Limits(config, model_folder, template)
    source = _open(config, verifier, seed, limits, responses)
    if template is None:
        return source
    from workers.data.chat import ChatPrompts

    return ChatPrompts(source, template)


def _template(config: DataConfig, model_folder: Path | None) -> ChatTemplate | None:
    if not config.chat_template:
        return None
    if model_folder is None:
        raise ConfigError("data.chat_template=True: needs the model's folder, which is not known here. Set model.path")
    from workers.data.chat import ChatTemplate

    return ChatTemplate(model_folder, config.chat_template_kwargs)


def _open(config: DataConfig, verifier: str, seed: int, limits: Limits, responses: bool) -> PromptSource:
    # Imported here, so that a run pays only for the source that it uses.
    if config.kind is DataKind.arithmetic:
        from workers.data.arithmetic import ArithmeticPrompts

        return Replaced(ArithmeticPrompts(config, verifier, seed), limits)
    if config.kind is DataKind.reasoning_gym:
        from workers.data.gym import GymPrompts

        return Replaced(GymPrompts(config, verifier, seed), limits)
    from workers.data.files import FilePrompts

    return FilePrompts(config, verifier, seed, limits, responses)


def check_index(index: int) -> None:
    """Raise `IndexError` unless `index` is a training index."""
    if index < 0:
        raise IndexError(f"training prompt {index}: indices start at 0")


def with_text(prompt: Prompt, text: str, response: str) -> Prompt:
    """`prompt` with another `text` and `response`."""
    return dataclasses.replace(prompt, text=text, response=response)

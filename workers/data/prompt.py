"""What a prompt is, and what a source of prompts promises.

A source is a pure function of the config and the seed: `train(index)` gives the same prompt in every process and after
every restart, so order and resumption follow from the index alone and no source keeps a position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

Message = tuple[str, str]
"""Role and content of a chat message."""


@dataclass(frozen=True)
class Prompt:
    """One question. `id` names it within its source; `reference` is what `verifier` needs to judge an answer (text or JSON). `response`:
    the answer that supervised training learns, as it follows the text; '' where the source knows none. `messages`: the chat that the prompt is,
    where it is one; it becomes the text when it is rendered. `place`: file and line, of those that come from files. `question`: the text before it
    was rendered, of those that were."""

    id: str
    text: str
    verifier: str
    reference: str
    response: str = ""
    messages: tuple[Message, ...] = ()
    place: str = dataclasses.field(default="", compare=False)
    question: str = dataclasses.field(default="", compare=False)

    @property
    def asked(self) -> str:
        """What prompts are the same by: chat templates strip what they are given, and parts of a mixture have different ones."""
        if len(self.messages) > 1:
            return "\n\n".join(f"{role}: {content.strip()}" for role, content in self.messages)
        return (self.question or self.text).strip()

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


def check_index(index: int) -> None:
    """Raise `IndexError` unless `index` is a training index."""
    if index < 0:
        raise IndexError(f"training prompt {index}: indices start at 0")


def with_text(prompt: Prompt, text: str, response: str) -> Prompt:
    """`prompt` with another `text` and `response`."""
    return dataclasses.replace(prompt, text=text, response=response, question=prompt.question or prompt.text)


class Rewritten:
    """A prompt source of which every prompt is rewritten, by a pure function."""

    def __init__(self, source: PromptSource, rewrite: Callable[[Prompt], Prompt]) -> None:
        self._source, self._rewrite = source, rewrite

    def train(self, index: int) -> Prompt:
        """The source's, rewritten."""
        return self._rewrite(self._source.train(index))

    def heldout(self) -> list[Prompt]:
        """The source's, rewritten."""
        return list(map(self._rewrite, self._source.heldout()))

    def preview(self, count: int) -> Iterator[Prompt]:
        """The source's, rewritten."""
        return map(self._rewrite, self._source.preview(count))

    def notes(self) -> list[str]:
        """The source's."""
        return self._source.notes()


def begun(text: str, bos: str) -> str:
    """`text` behind `bos`, unless it begins with that."""
    return text if text.startswith(bos) else bos + text

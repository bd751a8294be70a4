"""How what is said becomes text: by the model's chat template, or as it is.

    opening    the user's question ..................................... ends where the model's first turn begins
    following  what is said after a turn of the model, from that turn's end marker on, up to where its next turn begins

A template renders whole conversations; `following` is what it puts behind a turn of the model, so that the turn itself stays as it was sampled.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from workers.config import Config, DataConfig
from workers.data.chat import ChatTemplate
from workers.data.prompt import begun

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[list[dict[str, Any]], Sequence[dict] | None], str]

_MARK = "HEADWAYxQUESTION"
_TURN = "HEADWAYxTURNxOFxTHExMODEL"
"""Stands for a turn of the model in the text that a template renders."""


class TextFormat(Protocol):
    """Texts of prompts and of what is added to them. `marks_turns`: what follows a turn begins with the token that ends one. `template`: the chat
    template, which `shows_tools` where it is given some; `opens_thinking`: it begins each turn of the model with its reasoning."""

    marks_turns: bool
    template: str
    shows_tools: bool

    @property
    def opens_thinking(self) -> bool:
        """See above."""
        ...

    def opening(self, prompt: str | Messages, tools: Sequence[dict] | None = None) -> str:
        """The text of a conversation's beginning."""
        ...

    def following(self, added: str | Messages) -> str:
        """The text that follows a turn of the model."""
        ...


class PlainText:
    """No template: text is taken as it is, and each message becomes a new line of 'role: content'. `bos` stands before a conversation."""

    marks_turns = shows_tools = opens_thinking = False
    template = ""

    def __init__(self, bos: str = "") -> None:
        self._bos = bos

    def opening(self, prompt: str | Messages, tools: Sequence[dict] | None = None) -> str:
        """`prompt`, or its messages and the beginning of the assistant's."""
        return begun(prompt if isinstance(prompt, str) else _lines(prompt), self._bos)

    def following(self, added: str | Messages) -> str:
        """`added`, or its messages and the beginning of the assistant's."""
        return added if isinstance(added, str) else _lines(added)


class ChatText:
    """By a chat template: `render(messages, tools)` gives the text of a conversation with the opening of the assistant's next turn behind it."""

    marks_turns = True

    def __init__(self, render: Render, template: str = "") -> None:
        self._render, self.template = render, template
        self.shows_tools = re.search(r"\btools\b", template) is not None

    @functools.cached_property
    def opens_thinking(self) -> bool:
        """Whether the model's turns begin behind <think>."""
        return self.opening("?").rstrip().endswith("<think>")

    def opening(self, prompt: str | Messages, tools: Sequence[dict] | None = None) -> str:
        """The rendered messages; a text is the user's only one."""
        return self._render(_as_messages(prompt), tools)

    def following(self, added: str | Messages) -> str:
        """What the template puts behind a turn of the model. Raises ValueError where it shows no such turn."""
        text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}, *_as_messages(added)], None)
        _, found, following = text.rpartition(_TURN)
        if not found:
            raise ValueError("the chat template leaves out the assistant's turns: turns cannot follow each other. Use another template")
        return following


def _as_messages(said: str | Messages) -> list[dict[str, Any]]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else [dict(message) for message in said]


def _lines(messages: Messages) -> str:
    return "".join(f"\n{message['role']}: {message.get('content') or ''}" for message in messages) + "\nassistant:"


def text_of(config: Config) -> TextFormat:
    """How the turns of a run's episodes become text. Raises `ConfigError` where the model has no chat template that works."""
    return _text(config.model.path, config.data)


def texts_of_parts(config: Config) -> dict[str, TextFormat]:
    """The same of each part of a mixture, by name; {} for other data."""
    return {name: _text(config.model.path, part) for name, part in config.data.settled_parts().items()}


def _text(folder: str, data: DataConfig) -> TextFormat:
    if not data.chat_template:
        return PlainText(data.text_before)
    template = ChatTemplate(Path(folder), data.chat_template_kwargs, data.chat_template_date)
    return ChatText(template.render_chat, template.text)


def question(prompt: str, text: TextFormat) -> str:
    """The user's message in a rendered prompt; a prompt of several messages stays as it is."""
    before, _, after = text.opening(_MARK).partition(_MARK)
    whole = len(prompt) >= len(before) + len(after) and prompt.startswith(before) and prompt.endswith(after)
    return prompt[len(before): len(prompt) - len(after)] if whole else prompt

"""The model's chat template: renders a question as the user's turn and opens the assistant's.

The template is Jinja text from the model's folder. It is code from elsewhere, so it runs in Jinja's immutable sandbox,
set up as transformers does it, without importing transformers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.config import ConfigError, require
from workers.data.prompt import Message, Prompt, with_text
from workers.model.end_tokens import token_text

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OURS = {"messages", "add_generation_prompt", "tools", "documents", "raise_exception", "strftime_now"}


class ChatTemplate:
    """The chat template of `folder` (chat_template.jinja, else tokenizer_config.json), which is given `values` by name besides. `text`: as
    it stands there. `day`: what templates are told that ask for the date, as 2026-03-01; '' for today.

    Raises `ConfigError` if there is none that works, or where it does not read one of the `values`."""

    def __init__(self, folder: Path, values: Mapping[str, str | int | float | bool] | None = None, day: str = "") -> None:
        self._folder = folder
        config = read_tokenizer_config(folder)
        self._values: dict[str, Any] = {name: token_text(config[name]) for name in _SPECIAL_TOKENS if config.get(name) is not None}
        self._values |= values or {}
        self.text, environment = _template_text(folder, config), _environment(day)
        try:
            self._template = environment.from_string(self.text)
            read = jinja2.meta.find_undeclared_variables(environment.parse(self.text))
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: its chat template does not compile ({error}). Correct it or set data.chat_template=false") from error
        for name in values or {}:
            require(name in read - _OURS, "data.chat_template_kwargs", dict(values or {}), f"the chat template of {folder} does not read {name!r}",
                    f"It reads {', '.join(sorted(read - _OURS - set(_SPECIAL_TOKENS))) or 'nothing of this kind'}")
        self.render("test")

    def render(self, text: str) -> str:
        """`text` as the user's only message, with the opening of the assistant's answer behind it. Raises `ConfigError`."""
        return self.render_messages([("user", text)])

    def render_messages(self, messages: Sequence[Message], answer: bool = True) -> str:
        """A chat of (role, content); with `answer` the opening of the assistant's answer behind it. Raises `ConfigError`."""
        return self.render_chat([{"role": role, "content": content} for role, content in messages], answer=answer)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, answer: bool = True) -> str:
        """The same for messages as chat APIs have them, with the declarations of `tools` where the template shows them. Raises `ConfigError`."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=answer, tools=tools or None, documents=None, **self._values)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            named = [str(message.get("role")) for message in messages]
            roles = "a user's message" if named == ["user"] else f"messages of {', '.join(named)}"
            raise ConfigError(f"{self._folder}: its chat template cannot render {roles} ({error}). "
                              "Correct it or set data.chat_template=false") from error

    def render_prompt(self, prompt: Prompt) -> str:
        """A prompt's chat, or its text as the user's only message. Raises `ConfigError`."""
        return self.render_messages(prompt.messages or [("user", prompt.text)])


def rendered(prompt: Prompt, template: ChatTemplate) -> Prompt:
    """`prompt` as the model is given it; its response is stripped, as templates do. Raises `ConfigError`."""
    return with_text(prompt, template.render_prompt(prompt), prompt.response.strip())


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of `folder`; {} where there is none. Raises `ConfigError`."""
    path = folder / "tokenizer_config.json"
    config = _read(path, json.loads)
    return config if isinstance(config, dict) else {}


def _read(path: Path, parse: Callable[[str], Any] = str) -> Any:
    """What a file of the model's folder holds; None where there is none. Raises `ConfigError`."""
    try:
        return parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable ({error}). Copy the model again") from error


def _template_text(folder: Path, config: dict[str, Any]) -> str:
    own = _read(folder / "chat_template.jinja")
    if own is not None:
        return str(own)
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    if not isinstance(template, str):
        raise ConfigError(f"data.chat_template=True: {folder} has no chat template (neither chat_template.jinja nor one in "
                          "tokenizer_config.json). Set data.chat_template=false or use an instruction-tuned model")
    return template


def _environment(day: str) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda text: (datetime.datetime.fromisoformat(day) if day else datetime.datetime.now()).strftime(text)
    return environment


class _Generation(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: marks the assistant's tokens to transformers, and stands for what is in it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
             sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

"""Calls of tools as each family of models writes them, found in what a model has said.

    hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>                            Qwen2.5, Qwen3, and models of no other form
    qwen_xml  <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>   Qwen3-Coder
    llama3    {"name": ..., "parameters": {...}}, and nothing else                                Llama 3.1 to 3.3
    mistral   [TOOL_CALLS] [{"name": ..., "arguments": {...}}], or NAME[ARGS]{...}                Mistral, Mixtral

Markers that are special tokens ([TOOL_CALLS], <|python_tag|>) are not in the text: calls are known without them. What is no valid call of one of
the request's tools stays in the text.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.config import ConfigError
from workers.rollout.workflows.rendering import TextFormat

_OPENS, _CLOSES = re.compile(r"<tool_call>\s*(?=\{)"), re.compile(r"\s*</tool_call>")
_XML = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>((?:(?!<function=).)*?)</function>(?:\s*</tool_call>)?", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL)
_MARKS = {"mistral": ("[TOOL_CALLS]",), "qwen_xml": ("<function=",), "hermes": ("<tool_call>",), "llama3": ("<|python_tag|>", '"parameters": ')}
_DECODER = json.JSONDecoder()
MAX_CALLS = 256
"""So many of a message are looked at: looking at a broken one takes time that grows with what is before it."""


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name`; `arguments`: JSON text of an object, written in one way, so that equal ones are equal. `id`: the agent's."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


Found = tuple[str, list[ToolCall]]
"""The text without the calls, and the calls."""


def to_json(value: Any) -> str:
    """JSON text as templates write it. Raises ValueError on what has none: NaN, half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def format_of(name: str, text: TextFormat) -> str:
    """The format that workflow.tool_format=`name` means where turns become text by `text`. Raises `ConfigError` where it cannot be that one."""
    shown = next((found for found, marks in _MARKS.items() if any(mark in text.template for mark in marks)), "hermes")
    if name not in ("auto", "hermes") and not text.shows_tools:
        raise ConfigError(f"workflow.tool_format={name!r}: the chat template shows the model no tools, which are then told in the form of hermes. "
                          "Use that, or a model whose template shows them")
    return shown if name == "auto" else name


def find_calls(text: str, tools: Sequence[dict], form: str) -> Found:
    """The calls of `tools` in `text`."""
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return _FORMS[form](text, parameters) if parameters else (text, [])


def _hermes(text: str, tools: dict[str, Any]) -> Found:
    rest: list[str] = []
    calls, last = list[ToolCall](), 0
    for match in itertools.islice(_OPENS.finditer(text, 0, text.rfind("</tool_call>") + 1), MAX_CALLS):
        value, end = (match.start() >= last and _first(text, match.end())) or (None, 0)
        closing = _CLOSES.match(text, end)
        if closing and (call := _call(value, tools)):
            rest, calls, last = [*rest, text[last:match.start()]], [*calls, call], closing.end()
    return "".join([*rest, text[last:]]), calls


def _qwen_xml(text: str, tools: dict[str, Any]) -> Found:
    def read(match: re.Match[str]) -> ToolCall | None:
        properties = (tools.get(match[1]) or {}).get("properties") or {}
        arguments = {key: _value(value, _kinds(properties.get(key))) for key, value in _PARAMETER.findall(match[2])}
        return _call({"name": match[1], "arguments": arguments}, tools)

    return _taken(_XML, read, text)


def _llama3(text: str, tools: dict[str, Any]) -> Found:
    calls = [_call(value, tools) for value in _values(text.strip().removeprefix("<|python_tag|>"))]
    return ("", [call for call in calls if call]) if calls and all(calls) else (text, [])


def _mistral(text: str, tools: dict[str, Any]) -> Found:
    for match in re.finditer(r"\[(?=\s*\{)", text):
        values, end = _first(text, match.start()) or ([], 0)
        calls = [_call(value, tools) for value in values]
        if calls and all(calls) and not text[end:].strip():
            return _before(text, match.start()), [call for call in calls if call]
    names = "|".join(map(re.escape, sorted(tools, key=len, reverse=True)))
    named = re.compile(rf"(?<!\w)({names})\s*(?:\[ARGS\])?\s*(?=\{{)")
    start, end = len(text), 0
    found: list[ToolCall] = []
    for match in named.finditer(text):
        value, stop = _first(text, match.end()) or (None, 0)
        if match.start() >= end and (call := _call({"name": match[1], "arguments": value}, tools)):
            found, start, end = [*found, call], min(start, match.start()), stop
    return (_before(text, start), found) if found and not text[end:].strip() else (text, [])


def _before(text: str, start: int) -> str:
    """What stands before Mistral's calls."""
    said = text[:start].rstrip()
    return said.removesuffix("[TOOL_CALLS]") if said.endswith("[TOOL_CALLS]") else text[:start]


def _taken(pattern: re.Pattern[str], read: Callable[[re.Match[str]], ToolCall | None], text: str) -> Found:
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = read(match)
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    return pattern.sub(take, text), calls


def _call(value: Any, tools: dict[str, Any]) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters", {}))
    try:
        written = to_json(arguments)
    except (ValueError, TypeError, RecursionError):
        return None
    return ToolCall(name, written) if isinstance(name, str) and name in tools and isinstance(arguments, dict) else None


def _first(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `start`, and where it ends."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def _values(text: str) -> Iterator[Any]:
    """JSON values one after the other, with ';' or nothing between them; None at what is none."""
    place = 0
    while found := _first(text, place):
        yield found[0]
        place = found[1] + len(text[found[1]:]) - len(text[found[1]:].lstrip(" ;\n"))
    if place < len(text) or not text:
        yield None


def _kinds(schema: Any) -> set[str]:
    """The types of JSON that a parameter's schema allows, as far as it says."""
    if not isinstance(schema, dict):
        return set()
    kind, choices = schema.get("type"), schema.get("anyOf", schema.get("oneOf", schema.get("allOf")))
    named = {kind} if isinstance(kind, str) else set(map(str, kind)) if isinstance(kind, list) else set()
    if any(isinstance(value, str) for value in [schema.get("const"), *(schema.get("enum") or ())]):
        named = named | {"string"}
    return named.union(*map(_kinds, choices)) if isinstance(choices, list) else named


def _value(text: str, kinds: set[str]) -> Any:
    """A parameter's text as a value of a type that the tool's schema allows. Lists and what is nothing else may be written as Python does."""
    if "string" in kinds and not ("null" in kinds and text == "null"):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            return json.loads(to_json(read(text)))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text


_FORMS: dict[str, Callable[[str, dict[str, Any]], Found]] = {"hermes": _hermes, "qwen_xml": _qwen_xml, "llama3": _llama3, "mistral": _mistral}

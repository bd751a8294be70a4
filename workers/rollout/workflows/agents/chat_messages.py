"""Messages of a chat as the model reads them: roles and texts, with tools in the Hermes form that Qwen's chat templates write.

    tools, system message        --> one system message, with the tools' schemas between <tools> and </tools>
    assistant's tool calls       --> <tool_call>{"name": ..., "arguments": {...}}</tool_call> in its text
    messages of tools            --> one user message, with each result between <tool_response> and </tool_response>
    what the model says          --> text, and the calls of tools in it
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(\{(?:(?!<tool_call>).)*?\})\s*</tool_call>", re.DOTALL)
_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


@dataclass(frozen=True)
class ToolCall:
    """A call of the tool `name`; `arguments`: JSON text of an object, written in one way, so that equal ones are equal."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ChatMessage:
    """One message. `content` of an assistant's has no white space around it: agents often strip it."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()


def to_json(value: Any) -> str:
    """JSON text as templates write it. Raises ValueError on what has none: NaN, half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def as_messages(said: Sequence[ChatMessage], tools: Sequence[dict] = ()) -> list[dict[str, str]]:
    """Messages {"role", "content"} for a chat template; those that begin a conversation with `tools`."""
    messages = []
    for role, run in groupby(said, key=lambda message: message.role):
        if role == "tool":
            results = "\n".join(f"<tool_response>\n{message.content}\n</tool_response>" for message in run)
            messages.append({"role": "user", "content": results})
        else:
            messages += [{"role": role, "content": _text(message)} for message in run]
    return _with_tools(messages, tools) if tools else messages


def _with_tools(messages: list[dict[str, str]], tools: Sequence[dict]) -> list[dict[str, str]]:
    text = _TOOLS.format(schemas="\n".join(map(to_json, tools)))
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: ChatMessage) -> str:
    calls = [f'<tool_call>\n{{"name": {to_json(call.name)}, "arguments": {call.arguments}}}\n</tool_call>' for call in message.calls]
    return "\n".join([message.content, *calls] if message.content or not calls else calls)


def reply(text: str, tools: Sequence[dict]) -> ChatMessage:
    """What the model said, as the agent is told: calls of `tools` apart from the text. What is no such call stays in the text."""
    names = {tool["function"]["name"] for tool in tools}
    calls: list[ToolCall] = []

    def taken(match: re.Match[str]) -> str:
        call = _call(match[1], names)
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = _CALL.sub(taken, text) if names else text
    return ChatMessage("assistant", content.strip(), tuple(calls))


def _call(text: str, names: set[str]) -> ToolCall | None:
    try:
        value = json.loads(text)
        name, arguments = value.get("name"), value.get("arguments", {})
        written = to_json(arguments)
    except (ValueError, RecursionError):
        return None
    return ToolCall(name, written) if isinstance(name, str) and name in names and isinstance(arguments, dict) else None

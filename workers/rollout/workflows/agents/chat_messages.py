"""Messages of a chat as the model reads them, and what it says as a message.

    chat template that shows tools  --> messages and tools as they are: it writes both in its model's form (tool_formats.py)
    any other                       --> tools in the Hermes form: one system message with the schemas between <tools> and </tools>, calls as text,
                                        results as a user's message
    what the model says             --> reasoning, text, and the calls of tools in it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from workers.rollout.workflows.agents.tool_formats import ToolCall, find_calls, to_json

THINKS, THOUGHT = "<think>", "</think>"
ID_CHARACTERS = 9
"""Of a call's id: Mistral's templates want so many."""
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
class ChatMessage:
    """One message. `content` of an assistant's has no white space around it: agents often strip it. `reasoning`: what an assistant thought, and
    `call_id`: which call a tool answers, are not compared: agents leave them out."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = field(default="", compare=False)
    call_id: str = field(default="", compare=False)


def as_messages(said: Sequence[ChatMessage], tools: Sequence[dict] = (), shows_tools: bool = False) -> list[dict[str, Any]]:
    """Messages for a chat template; those that begin a conversation with `tools`. `shows_tools`: the template itself does."""
    if shows_tools:
        return [_native(message, place) for place, message in enumerate(said)]
    messages = []
    for role, run in groupby(said, key=lambda message: message.role):
        if role == "tool":
            results = "\n".join(f"<tool_response>\n{message.content}\n</tool_response>" for message in run)
            messages.append({"role": "user", "content": results})
        else:
            messages += [{"role": role, "content": _text(message), **_reasoning(message)} for message in run]
    return _with_tools(messages, tools) if tools else messages


def _native(message: ChatMessage, place: int) -> dict[str, Any]:
    calls = [{"id": _short(call.id or f"{place:06d}{number:03d}"), "type": "function",
              "function": {"name": call.name, "arguments": json.loads(call.arguments)}} for number, call in enumerate(message.calls)]
    answered = {"tool_call_id": _short(message.call_id)} if message.role == "tool" else {}
    return {"role": message.role, "content": message.content, **_reasoning(message), **({"tool_calls": calls} if calls else {}), **answered}


def _short(call_id: str) -> str:
    return call_id[-ID_CHARACTERS:].rjust(ID_CHARACTERS, "0")


def _reasoning(message: ChatMessage) -> dict[str, str]:
    return {"reasoning_content": message.reasoning} if message.reasoning else {}


def _with_tools(messages: list[dict[str, str]], tools: Sequence[dict]) -> list[dict[str, str]]:
    text = _TOOLS.format(schemas="\n".join(map(to_json, tools)))
    if messages and messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _text(message: ChatMessage) -> str:
    calls = [f'<tool_call>\n{{"name": {to_json(call.name)}, "arguments": {call.arguments}}}\n</tool_call>' for call in message.calls]
    return "\n".join([message.content, *calls] if message.content or not calls else calls)


def reply(text: str, tools: Sequence[dict], form: str = "hermes", thinks: bool = False) -> ChatMessage:
    """What the model said, as the agent is told: its reasoning and the calls of `tools`, written in `form`, apart from the text. `thinks`: the
    template has opened the reasoning."""
    reasoning, text = split_reasoning(text, thinks)
    content, calls = find_calls(text, tools, form)
    return ChatMessage("assistant", content.strip(), tuple(calls), reasoning)


def split_reasoning(text: str, thinks: bool = False) -> tuple[str, str]:
    """What stands up to </think>, and what behind it; without it all is text, but where the reasoning was begun."""
    before, found, after = text.partition(THOUGHT)
    begun = text.lstrip().startswith(THINKS)
    if not found and not begun and not thinks:
        return "", text
    return before.strip().removeprefix(THINKS).strip(), after

"""Requests of OpenAI's chat completions API (https://platform.openai.com/docs/api-reference/chat): read, checked, and refused as that API does.

How tokens are drawn is the run's: training reckons with it. So temperature and the like of a request are ignored, and named in `ignored`; what
would change what an answer is (n, response_format, a forced tool) is refused, and so is what is not known.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from workers.rollout.workflows.agents.chat_messages import ChatMessage, split_reasoning
from workers.rollout.workflows.agents.tool_formats import ToolCall, to_json

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty")
MAX_STOPS = 16


class ApiError(Exception):
    """What a request is answered with instead; an HTTP status, and the parts of OpenAI's error object."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = {401: "authentication_error", 429: "rate_limit_error", 503: "server_error"}.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    tool_call_id: str | None = None


class _ToolFunction(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _ToolFunction


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Asked(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What requests for text and for a chat have in common; `logprobs` is a number in the one and a switch in the other."""

    model: str
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: Any = None
    n: int | None = None
    logit_bias: dict[str, float] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    user: Any = None


class _Body(Asked, forbid_unknown_fields=True, kw_only=True):
    messages: list[_Message]
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None


@dataclass(frozen=True)
class ChatRequest:
    """What an agent asks for. `tools`: their schemas; `calls_tools`: calls are looked for in the answer; `max_new_tokens`: None is the run's;
    `ignored`: which of `SAMPLING` it gave. `prompt`: text or tokens to be completed, in place of messages (completions.py)."""

    model: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[dict, ...]
    calls_tools: bool
    max_new_tokens: int | None
    stop: tuple[str, ...]
    streams: bool
    streams_usage: bool
    logprobs: bool
    ignored: tuple[str, ...]
    prompt: str | tuple[int, ...] | None = None

    @property
    def num_characters(self) -> int:
        """Of all that the template will show: what was said, calls and tools."""
        said = sum(len(message.content) + sum(len(call.arguments) for call in message.calls) for message in self.messages)
        return said + sum(len(to_json(tool)) for tool in self.tools) + len(self.prompt or "")


def read_chat(body: bytes) -> ChatRequest:
    """Read a request of POST /v1/chat/completions. Raises `ApiError`."""
    asked = read(body, _Body)
    _refuse(asked)
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    return ChatRequest(asked.model, tuple(_said(message, place) for place, message in enumerate(asked.messages)), tuple(asked.tools or ()),
                       asked.tool_choice != "none", *generation(asked, limits))


def generation(asked: Asked, limits: list[int]) -> tuple[int | None, tuple[str, ...], bool, bool, bool, tuple[str, ...]]:
    """Of a `ChatRequest`: max_new_tokens, stop, streams, streams_usage, logprobs and ignored. Raises `ApiError`."""
    stop = () if asked.stop is None else (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop)
    require(all(stop) and len(stop) <= MAX_STOPS, f"must be at most {MAX_STOPS} strings, none of them empty", "stop")
    require(all(limit >= 1 for limit in limits), "must be at least 1", "max_completion_tokens")
    return (min(limits, default=None), stop, bool(asked.stream), asked.stream_options is not None and asked.stream_options.include_usage,
            asked.logprobs not in (None, False), tuple(name for name in SAMPLING if getattr(asked, name) is not None))


def read_reward(body: bytes) -> float:
    """Read a request of POST /v1/reward: {"reward": number in [0, 1]}. Raises `ApiError`."""
    value = read(body, dict[str, float])
    reward = value.get("reward", math.nan)
    require(set(value) == {"reward"} and 0.0 <= reward <= 1.0, 'must be the only key, and a number from 0 to 1: {"reward": 1.0}', "reward")
    return float(reward)


def read(body: bytes, kind: Any) -> Any:
    """`body` as JSON of a `kind`. Raises `ApiError`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the request cannot be read: {str(error)[:500]}", "invalid_request") from error


def require(ok: bool, rule: str, param: str, code: str = "invalid_value") -> None:
    """Raise `ApiError` unless `ok`."""
    if not ok:
        raise ApiError(400, f"{param}: {rule}", code, param)


def _refuse(asked: _Body) -> None:
    """Refuse what cannot be done here."""
    plain = asked.response_format is None or (isinstance(asked.response_format, dict) and asked.response_format.get("type") == "text")
    require(asked.n in (None, 1), "must be 1. Send several requests", "n", "unsupported_value")
    require(plain, "must be text: the answer is what the model samples", "response_format", "unsupported_value")
    require(asked.tool_choice in (None, "auto", "none"), "must be auto or none: a call cannot be forced", "tool_choice", "unsupported_value")
    require(not asked.logit_bias, "is not supported", "logit_bias", "unsupported_value")
    require(not asked.top_logprobs, "must be 0: only the log-probs of sampled tokens are known", "top_logprobs", "unsupported_value")
    require(bool(asked.messages), "must hold at least one message", "messages")
    require(asked.messages[-1].role != "assistant", "the last message must not be the assistant's: that is what is asked for", "messages")
    for tool in asked.tools or ():
        try:
            msgspec.convert(tool, _Tool)
        except msgspec.ValidationError as error:
            raise ApiError(400, f'tools: each must be {{"type": "function", "function": {{"name": ...}}}} ({error})', "invalid_value", "tools") \
                from error


def _said(message: _Message, place: int) -> ChatMessage:
    role = "system" if message.role == "developer" else message.role
    content = message.content or ""
    if not isinstance(content, str):
        texts = [part.text if part.type == "text" else part.refusal if part.type == "refusal" else None for part in content]
        require(None not in texts, "only parts of text can be read", f"messages[{place}].content", "unsupported_value")
        content = "".join(text for text in texts if text is not None)
    calls = tuple(ToolCall(call.function.name, _canonical(call.function.arguments), call.id or "") for call in message.tool_calls or ())
    if role != "assistant":
        return ChatMessage(role, content, calls, call_id=message.tool_call_id or "")
    reasoning, content = split_reasoning(content) if message.reasoning_content is None else (message.reasoning_content, content)
    return ChatMessage(role, content.strip(), calls, reasoning.strip())


def _canonical(arguments: str) -> str:
    """JSON text of a call's arguments, however an agent has written it; what is no JSON becomes a JSON string."""
    try:
        return to_json(json.loads(arguments or "{}"))
    except (ValueError, RecursionError):
        return to_json(arguments)

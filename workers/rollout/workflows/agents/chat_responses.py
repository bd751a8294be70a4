"""Answers of OpenAI's chat completions API, whole and as a stream of server-sent events.

A turn is sampled to its end first (updates of weights interrupt and continue it, which nobody sees here): a stream tells it in a few pieces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from workers.rollout.workflows.agents.chat_messages import ChatMessage
from workers.rollout.workflows.agents.chat_requests import ChatRequest
from workers.rollout.workflows.episode import Reply


@dataclass(frozen=True)
class Answer:
    """A turn of the model. `number`: of the episode's turns; `num_prompt_tokens`: all that stood before it."""

    request: ChatRequest
    number: int
    said: ChatMessage
    reply: Reply
    num_prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def finish(self) -> str:
        """OpenAI's finish_reason."""
        return "tool_calls" if self.said.calls else self.reply.finish

    def whole(self) -> dict[str, Any]:
        """A chat.completion object."""
        message = {"role": "assistant", "content": self._content(), "refusal": None, **self._reasoning(),
                   **({"tool_calls": calls} if (calls := self._calls()) else {})}
        choice = {"index": 0, "message": message, "finish_reason": self.finish, "logprobs": self._logprobs()}
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    def stream(self) -> Iterator[bytes]:
        """chat.completion.chunk objects as events."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": None if self._content() is None else ""}]
        deltas += [reasoning] if (reasoning := self._reasoning()) else []
        deltas += [{"content": self.said.content}] if self.said.content else []
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(self._calls())]
        for delta in deltas:
            yield self._event([{"index": 0, "delta": delta, "finish_reason": None, "logprobs": self._logprobs() if delta is deltas[0] else None}])
        yield self._event([{"index": 0, "delta": {}, "finish_reason": self.finish, "logprobs": None}])
        if self.request.streams_usage:
            yield self._event([], self._usage())
        yield b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        chunk = {**self._head("chat.completion.chunk"), "choices": choices, **({"usage": usage} if self.request.streams_usage else {})}
        return f"data: {json.dumps(chunk)}\n\n".encode()

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.number}", "object": kind, "created": self.created, "model": self.request.model}

    def _content(self) -> str | None:
        return self.said.content or (None if self.said.calls else "")

    def _reasoning(self) -> dict[str, str]:
        return {"reasoning_content": self.said.reasoning} if self.said.reasoning else {}

    def _calls(self) -> list[dict[str, Any]]:
        return [{"id": f"{self.number:06d}{index:03d}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for index, call in enumerate(self.said.calls)]

    def _usage(self) -> dict[str, int]:
        before, sampled = self.num_prompt_tokens, len(self.reply.tokens)
        return {"prompt_tokens": before, "completion_tokens": sampled, "total_tokens": before + sampled}

    def _logprobs(self) -> dict[str, Any] | None:
        """Of all sampled tokens, each named by its id."""
        if not self.request.logprobs:
            return None
        pairs = zip(self.reply.tokens, self.reply.logprobs, strict=True)
        return {"content": [{"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []} for token, logprob in pairs],
                "refusal": None}

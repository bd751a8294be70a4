"""POST /v1/completions (https://platform.openai.com/docs/api-reference/completions): text, or tokens, that the model goes on from as they are.

    prompt = an earlier prompt, what the model said then, and something new --> that conversation goes on behind the tokens that were sampled
    any other prompt --> a new one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from workers.rollout.workflows.agents.chat_requests import Asked, ChatRequest, generation, read, require
from workers.rollout.workflows.agents.chat_responses import Answer
from workers.rollout.workflows.episode import Conversation, Model

_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Body(Asked, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[_Token]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


def read_completion(body: bytes) -> ChatRequest:
    """Read a request. Raises `ApiError`."""
    asked = read(body, _Body)
    for name, plain in (("n", (None, 1)), ("best_of", (None, 1)), ("echo", (None, False)), ("suffix", (None, "")), ("logit_bias", (None, {})),
                        ("logprobs", (None, 0, 1))):
        require(getattr(asked, name) in plain, f"must be one of {', '.join(map(repr, plain[1:]))}, or left out", name, "unsupported_value")
    require(bool(asked.prompt), "must not be empty", "prompt")
    prompt = asked.prompt if isinstance(asked.prompt, str) else tuple(asked.prompt)
    return ChatRequest(asked.model, (), (), False, *generation(asked, [] if asked.max_tokens is None else [asked.max_tokens]), prompt)


def what_is_new(model: Model, conversation: Conversation, said: str, prompt: str | tuple[int, ...]) -> list[int] | None:
    """The tokens of `prompt` behind those of `conversation`, whose text is `said`; None where `prompt` does not go on from it.

    A turn that the model ended by a special token is gone on from by a text that begins with that token.
    """
    tokens = conversation.tokens
    if not isinstance(prompt, str):
        return list(prompt[len(tokens):]) if len(prompt) > len(tokens) and list(prompt[: len(tokens)]) == tokens else None
    if len(prompt) <= len(said) or not prompt.startswith(said):
        return None
    new = model.encode(prompt[len(said):])
    if model.decode(tokens[-1:]):
        return new
    return new[1:] if len(new) > 1 and new[0] == tokens[-1] else None


@dataclass(frozen=True)
class Completion(Answer):
    """The answer to such a request."""

    def whole(self) -> dict[str, Any]:
        """A text_completion object."""
        return {**self._head("text_completion"), "choices": [self._choice(self.reply.text, self.reply.finish)], "usage": self._usage()}

    def stream(self) -> Iterator[bytes]:
        """text_completion objects as events."""
        yield self._event([self._choice(self.reply.text, None)])
        yield self._event([{**self._choice("", self.reply.finish), "logprobs": None}])
        if self.request.streams_usage:
            yield self._event([], self._usage())
        yield b"data: [DONE]\n\n"

    def _choice(self, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "finish_reason": finish, "logprobs": self._logprobs()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {**super()._head("text_completion"), "id": f"cmpl-{self.number}"}

    def _logprobs(self) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"tokens": [f"token_id:{token}" for token in self.reply.tokens], "token_logprobs": list(self.reply.logprobs), "top_logprobs": None,
                "text_offset": []}
